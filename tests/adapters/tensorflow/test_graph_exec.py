"""Programs written for TensorFlow 1 run unmodified through `carpool exec --tf1`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import carpool
from patience import PATIENCE_S

TUTORIAL = '''
"""A linear model, the way tutorials were written in 2016."""
from __future__ import print_function

import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import numpy
import tensorflow as tf

flags = tf.app.flags
FLAGS = flags.FLAGS
flags.DEFINE_float("learning_rate", 0.05, "How far a step goes.")
flags.DEFINE_integer("training_epochs", 40, "How often the data is read.")

rng = numpy.random.RandomState(0)
train_X = rng.rand(20).astype("float32")
train_Y = 3 * train_X + 1

def main(_):
    tf.set_random_seed(0)
    X = tf.placeholder("float")
    Y = tf.placeholder("float")
    with tf.variable_scope("model"):
        W = tf.Variable(tf.truncated_normal([], stddev=0.1), name="weight")
        b = tf.get_variable("bias", [], initializer=tf.zeros_initializer())
    pred = tf.add(tf.multiply(X, W), b)
    cost = tf.reduce_sum(tf.pow(pred - Y, 2)) / 20
    optimizer = tf.train.GradientDescentOptimizer(FLAGS.learning_rate).minimize(cost)
    tf.summary.scalar("cost", cost)
    merged = tf.summary.merge_all()
    saver = tf.train.Saver()
    with tf.Session(config=tf.ConfigProto(allow_soft_placement=True)) as sess:
        writer = tf.summary.FileWriter("logs", sess.graph)
        sess.run(tf.global_variables_initializer())
        for epoch in range(FLAGS.training_epochs):
            for (x, y) in zip(train_X, train_Y):
                sess.run(optimizer, feed_dict={X: x, Y: y})
            summary, c = sess.run([merged, cost], feed_dict={X: train_X, Y: train_Y})
            writer.add_summary(summary, epoch)
        print("Epoch:", "%04d" % (epoch + 1), "cost=", "{:.9f}".format(c), "W=", sess.run(W), "b=", b.eval())
        print("Saved to", saver.save(sess, "./model.ckpt"))
        assert isinstance(W.shape.num_elements(), int) and X.dtype == tf.float32

if __name__ == "__main__":
    tf.app.run()
'''


def ran(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(carpool.__file__).parents[1])
    paths = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "carpool", "exec", "--tf1", "--logs", "out", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.mark.slow
def test_a_tutorial_of_2016_runs_as_it_is(tmp_path: Path):
    (tmp_path / "linear.py").write_text(TUTORIAL)
    done = ran(
        tmp_path,
        "linear.py",
        "--training_epochs=30",
        "--learning_rate=1.0",
        ":",
        "-m",
        "linear",
        "--learning_rate=0.0",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (cost,) = re.findall(r"linear \| Epoch: 0030 cost= (\S+)", done.stdout)
    assert float(cost) < 0.05
    assert "linear-2 | Epoch: 0040 cost=" in done.stdout
    assert (tmp_path / "model.ckpt.index").exists()
    assert list((tmp_path / "logs").glob("events*"))


OLD = {
    "attribute": ("import tensorflow as tf\ntf.contrib.layers", "AttributeError"),
    "module": ("import tensorflow.contrib.slim as slim", "ImportError"),
    "part": ("from tensorflow import contrib", "ImportError"),
    "deeper": ("from tensorflow.contrib.rnn import BasicLSTMCell", "ImportError"),
    "examples": ("from tensorflow.examples.tutorials.mnist import input_data", "ImportError"),
    "layers": ("import tensorflow as tf\ntf.layers", "AttributeError"),
}


def test_what_is_gone_is_said_with_the_remedy(tmp_path: Path):
    script = "import os, sys\nOLD = " + repr({name: text for name, (text, _) in OLD.items()})
    script += "\nfor name, text in OLD.items():\n"
    script += "    try:\n        exec(text)\n    except Exception as error:\n"
    script += "        print(name, type(error).__name__, error)\n"
    script += "import tensorflow.compat.v1 as ported, tensorflow as tf\n"
    script += "print('ported', ported.Session is tf.Session, hasattr(tf, 'contrib'), __name__, sys.path[0] == os.getcwd())\n"
    (tmp_path / "old.py").write_text(script)
    done = ran(tmp_path, "old.py")
    assert done.returncode == 0, done.stdout + done.stderr
    for name, (_, kind) in OLD.items():
        assert re.search(rf"old \| {name} {kind} Expected .* Remedy: ", done.stdout), done.stdout
    assert "ported True False __main__ True" in done.stdout


def test_only_python_can_be_given_another_tensorflow(tmp_path: Path):
    done = ran(tmp_path, "sh", "-c", "true")
    assert done.returncode == 2
    assert "Python files and modules with --tf1" in done.stderr


@pytest.mark.parametrize("text", ["raise SystemExit(3)", "1 / 0"])
def test_a_program_that_fails_says_so(tmp_path: Path, text: str):
    (tmp_path / "bad.py").write_text(text)
    assert ran(tmp_path, "bad.py").returncode == 1
