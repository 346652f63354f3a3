"""One job over several devices: a module under a MirroredStrategy ends where it ends on one. The devices are two logical CPUs."""

from __future__ import annotations

import pytest
from subprocesses import run

COMPARE = """
import numpy as np, tensorflow as tf, keras, carpool
[cpu] = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from modules_zoo import Embedding, Mlp, V1, data, loss, variables

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
x, y = data(double=True)

def trained(kind, rule, mirrored, given=None, **options):
    def make(seed):
        if not mirrored:
            return kind(seed, tf.float64)
        with strategy.scope():
            return kind(seed, tf.float64)
    job = carpool.Job(make, given or (x, y), loss=loss, optimizer=rule, batch_size=16, epochs=4, seed=1, shuffle=given is None,
                      validation_data=(x[:23], y[:23]), name="a", **options)
    [result] = carpool.train([job], device="cpu", reporters=[])
    assert result.outcome is carpool.Outcome.COMPLETED, result.error
    return result

def compare(kind, rule, **options):
    two, one = (trained(kind, rule, mirrored, **options) for mirrored in (True, False))
    assert type(variables(two.model)[0].variable).__name__ == "MirroredVariable"
    for ours, theirs in zip(variables(two.model), variables(one.model), strict=True):
        np.testing.assert_allclose(ours.read(), theirs.read(), rtol=0, atol=1e-8, err_msg=ours.name)
        copies = [np.asarray(copy) for copy in ours.variable.values]
        np.testing.assert_array_equal(copies[0], copies[1])
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose(two.history[name], one.history[name], rtol=1e-8)
    return two

"""

FIRST = """
two = compare(Mlp, lambda: keras.optimizers.Adam(0.01))
assert "tf.distribute strategy" in two.reason, two.reason
print("the same")
"""

OTHERS = """
compare(Mlp, lambda: keras.optimizers.SGD(0.1, momentum=0.9), clip_norm=0.05)
compare(Embedding, lambda: V1.AdagradOptimizer(0.05))
compare(Mlp, lambda: keras.optimizers.SGD(0.1), given=tf.data.Dataset.from_tensor_slices((x, y)).batch(15))
print("the same")
"""

STATES = """
from carpool.adapters.tensorflow.train import TensorFlowAdapter
from carpool.adapters.tensorflow.state import write

def described(mirrored):
    adapter = TensorFlowAdapter()
    adapter.device("cpu")
    def make(seed):
        if not mirrored:
            return Mlp(seed, tf.float64)
        with strategy.scope():
            return Mlp(seed, tf.float64)
    job = carpool.Job(make, (x, y), loss=loss, optimizer=lambda: keras.optimizers.Adam(0.01), seed=int(mirrored), name="a")
    adapter.describe(job)
    return adapter, job

(two, ours), (one, theirs) = described(True), described(False)
two.absorb(ours, one.left(theirs))
for a, b in zip(variables(two.trained(ours).model), variables(one.trained(theirs).model), strict=True):
    for copy in a.variable.values:
        np.testing.assert_array_equal(np.asarray(copy), b.read())
with strategy.scope():
    model = Mlp(0, tf.float64)
def own(model, batch):
    return loss(model(batch[0]), batch[1])
try:
    carpool.train([carpool.Job(model, (x, y), step=own, name="b")], reporters=[])
except carpool.CarpoolError as error:
    print(error)
"""


@pytest.mark.slow  # tests/test_sources.py trains over two devices too
def test_two_devices_end_where_one_ends():
    assert "the same" in run(COMPARE + FIRST)


@pytest.mark.slow
def test_clipping_sparse_gradients_and_datasets_on_two_devices():
    assert "the same" in run(COMPARE + OTHERS)


@pytest.mark.slow
def test_states_go_from_one_device_to_two():
    assert "an optimizer" in run(COMPARE + STATES)
