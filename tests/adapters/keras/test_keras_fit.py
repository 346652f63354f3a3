"""`carpool.fit` beside `model.fit`: the three different models, every kind of data and every argument."""

import keras
import keras_zoo as zoo
import numpy as np
import pytest
from keras import layers

import carpool

SPEC = {"a": (1000, 32, 64, 10, 1e-3), "b": (800, 64, 128, 5, 5e-4), "c": (1200, 16, 32, 2, 2e-3)}


def three_data() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    made = {}
    for name, (samples, features, _, classes, _) in SPEC.items():
        numbers = np.random.default_rng(0)
        x = numbers.normal(size=(samples, features)).astype("float32")
        made[name] = x, numbers.integers(0, classes, samples).astype("int32")
    return made


def one_of_three(name: str, dropout: float = 0.0, seed: int = 0) -> keras.Model:
    _, features, hidden, classes, rate = SPEC[name]
    with zoo.seeded(seed):
        dropped = [layers.Dropout(dropout, seed=7)] if dropout else []
        first, last = layers.Dense(hidden, activation="relu"), layers.Dense(classes, activation="softmax")
        model = keras.Sequential([keras.Input((features,)), first, *dropped, last])
    model.compile(keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def three_models() -> dict[str, keras.Model]:
    return {name: one_of_three(name) for name in SPEC}


def three_fitted(models, **arguments):
    data = three_data()
    x = carpool.each(**{name: data[name][0] for name in models})
    y = carpool.each(**{name: data[name][1] for name in models})
    return zoo.ours(models, x, y, batch_size=32, epochs=2, **arguments)


@pytest.mark.slow
def test_three_different_models_end_as_their_own_fits_would():
    models, alone = three_models(), three_models()
    results = three_fitted(models)
    for name, (x, y) in three_data().items():
        expected = zoo.alone(alone[name], x, y, batch_size=32, epochs=2)
        zoo.assert_history(results[name].history, expected)
        zoo.assert_same_model(models[name], alone[name])


@pytest.mark.slow
def test_with_shuffling_and_dropout_eight_of_eight_equal_the_job_alone_in_any_order():
    data = three_data()
    names = [("a", 0), ("b", 1), ("c", 2), ("a", 3), ("b", 4), ("c", 5), ("a", 6), ("c", 7)]

    def job(name, seed):
        model = one_of_three(name, dropout=0.2, seed=seed)
        return carpool.Job(model, data[name], name=f"{name}{seed}", epochs=2, seed=seed)

    def run(jobs):
        return carpool.train(jobs, device="cpu", reporters=[])

    forward = run([job(*one) for one in names])
    backward = run([job(*one) for one in names[::-1]])
    assert {result.strategy for result in forward} == {"fused"}
    for one in names:
        name = f"{one[0]}{one[1]}"
        own = run([job(*one)])[name]
        for together in (forward[name], backward[name]):
            zoo.assert_history(together.history, own.history)
            zoo.assert_same_model(together.model, own.model)
        assert own.history["loss"][1] != own.history["loss"][0]


def test_shuffling_reads_in_the_published_order():
    x, y = zoo.arrays(5)
    reference, model = zoo.sequential(), zoo.sequential()
    losses = []
    for epoch in range(2):
        order = carpool.batch_order(5, epoch, len(x))
        losses += zoo.alone(reference, x[order], y[order], epochs=1)["loss"]
    result = zoo.ours([model], x, y, epochs=2, shuffle=True, seed=5)[0]
    np.testing.assert_allclose(result.history["loss"], losses, rtol=zoo.RTOL)


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return -(-len(self.x) // 8)

    def __getitem__(self, item):
        return self.x[item * 8 : item * 8 + 8], self.y[item * 8 : item * 8 + 8]


def endless(x, y):
    while True:
        for item in range(-(-len(x) // 8)):
            yield x[item * 8 : item * 8 + 8], y[item * 8 : item * 8 + 8]


def tf_dataset(x, y):
    tensorflow = pytest.importorskip("tensorflow")
    return tensorflow.data.Dataset.from_tensor_slices((x, y)).batch(8)


def torch_loader(x, y):
    torch = pytest.importorskip("torch")
    held = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y).long())
    return torch.utils.data.DataLoader(held, batch_size=8)


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        pytest.param(Batches, {}, id="PyDataset", marks=pytest.mark.slow),  # one is read below as well
        pytest.param(endless, {"steps_per_epoch": 4}, id="generator"),
        pytest.param(tf_dataset, {}, id="tf.data"),
        pytest.param(torch_loader, {}, id="DataLoader"),
    ],
)
def test_data_that_keras_reads_batch_by_batch(make, arguments):
    x, y = zoo.arrays(5)
    reference, model, beside = zoo.sequential(), zoo.sequential(), zoo.sequential(seed=1)
    expected = reference.fit(make(x, y), epochs=3, verbose=0, shuffle=False, **arguments).history
    jobs = [
        carpool.Job(model, make(x, y), name="streamed", epochs=3, shuffle=False, fit=arguments),
        carpool.Job(beside, (x, y), name="beside", epochs=3, batch_size=8, shuffle=False),
    ]
    results = carpool.train(jobs, reporters=[], device="cpu")
    zoo.assert_history(results["streamed"].history, expected)
    assert "own fit" in results["streamed"].reason
    zoo.assert_same_model(model, reference)
    zoo.assert_history(results["beside"].history, zoo.alone(zoo.sequential(seed=1), x, y))


@pytest.mark.parametrize("form", ["float64", "int64 labels", "pandas", "tensor", "column"])
def test_arrays_of_every_kind(form):
    x, y = zoo.arrays(5)
    if form == "float64":
        x = x.astype("float64")
    elif form == "int64 labels":
        y = y.astype("int64")
    elif form == "pandas":
        pandas = pytest.importorskip("pandas")
        x, y = pandas.DataFrame(x), pandas.Series(y)
    elif form == "tensor":
        x, y = keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y)
    else:
        y = y[:, None]
    zoo.assert_as_alone(zoo.sequential, x, y)


WEIGHTS = np.linspace(0.1, 2.0, zoo.SAMPLES).astype("float32")


@pytest.mark.parametrize(
    "arguments",
    [
        {"sample_weight": WEIGHTS},
        {"class_weight": {0: 1.0, 1: 3.0}},
        {"validation_data": zoo.arrays(5, samples=11, seed=3)},
        {"validation_data": (*zoo.arrays(5, seed=3), WEIGHTS)},
        {"validation_split": 0.3, "sample_weight": WEIGHTS},
        {"validation_split": 0.3, "validation_freq": 2, "validation_batch_size": 5},
        {"validation_split": 0.3, "validation_freq": [1, 3]},
        {"validation_data": zoo.arrays(5, seed=3), "validation_steps": 2},
        {"initial_epoch": 1, "validation_data": zoo.arrays(5, seed=3), "validation_freq": 2},
        {"batch_size": 100},
        {"steps_per_epoch": 2, "epochs": 2},
        {"validation_data": Batches(*zoo.arrays(5, seed=3))},
    ],
    ids=lambda arguments: ",".join(arguments),
)
def test_arguments_of_fit(arguments):
    x, y = zoo.arrays(5)
    zoo.assert_as_alone(zoo.sequential, x, y, **arguments)


def test_members_with_validation_and_weights_stand_together_and_equal_their_own_fits():
    x, y = zoo.arrays(5)
    arguments = {"validation_split": 0.3, "class_weight": {0: 1.0, 1: 3.0}}
    models = [zoo.sequential(rate=rate, seed=i) for i, rate in enumerate((0.05, 0.1, 0.2))]
    results = zoo.ours(models, x, y, strategy="fused", **arguments)
    for i, rate in enumerate((0.05, 0.1, 0.2)):
        expected = zoo.alone(zoo.sequential(rate=rate, seed=i), x, y, **arguments)
        zoo.assert_history(results[i].history, expected)


def test_members_of_unequal_lengths_epochs_and_beginnings_stand_together():
    data = [zoo.arrays(5), zoo.arrays(5, samples=19, seed=1), zoo.arrays(5, samples=8, seed=2)]
    arguments = [{"epochs": 4}, {"epochs": 2}, {"epochs": 3, "initial_epoch": 2}]
    jobs = []
    for i, (pair, own) in enumerate(zip(data, arguments, strict=True)):
        fit = {"initial_epoch": own.get("initial_epoch", 0)}
        jobs.append(
            carpool.Job(
                zoo.sequential(seed=i), pair, batch_size=8, shuffle=False, epochs=own["epochs"], fit=fit
            )
        )
    results = carpool.train(jobs, strategy="fused", reporters=[], device="cpu")
    for i, (pair, own) in enumerate(zip(data, arguments, strict=True)):
        reference = zoo.sequential(seed=i)
        zoo.assert_history(results[i].history, zoo.alone(reference, *pair, **own))
        zoo.assert_same_model(results[i].model, reference)


def test_an_index_reads_those_samples_alone():
    x, y = zoo.arrays(5)
    index = np.arange(3, 20)
    expected = zoo.alone(zoo.sequential(), x[index], y[index])
    for strategy in ("auto", "in_turn"):
        result = zoo.ours([zoo.sequential()], x, y, index=index, strategy=strategy)[0]
        zoo.assert_history(result.history, expected)


def test_a_hundred_learning_rates_of_one_model_are_compiled_once():
    if zoo.BACKEND != "jax":
        pytest.skip("programs are counted on JAX")
    from carpool.adapters.keras import jax_engine

    x, y = zoo.arrays(5, samples=24)
    models = [zoo.sequential(rate=0.001 * (i + 1)) for i in range(100)]
    before = set(jax_engine._programs)
    results = zoo.ours(models, x, y, epochs=1)
    made = set(jax_engine._programs) - before
    assert {result.strategy for result in results} == {"fused"}
    wide = [asked.kind for asked in made if asked.width == 100]
    assert wide.count("epochs") == 1
    assert len(wide) <= 2  # the other is the first step, where that was not compared before
    assert len({result.history["loss"][0] for result in results}) == 100


def test_a_large_model_alone_keeps_its_own_arrays(monkeypatch):
    """Programs write over a large state; the model's arrays are copied before, and those it is given afterwards are its own."""
    if zoo.BACKEND != "jax":
        pytest.skip("arrays are taken as they are on JAX")
    from carpool.adapters.keras import jax_engine

    monkeypatch.setattr(jax_engine, "_SMALL_BYTES", 0)
    x, y = zoo.arrays(5)
    model = zoo.sequential()
    before = [variable.value for variable in model.variables]
    (result,) = zoo.ours([model], x, y, epochs=3)
    assert not any(value.is_deleted() for value in before)
    other = zoo.sequential()
    zoo.assert_history(result.history, zoo.alone(other, x, y, epochs=3))
    zoo.assert_same_model(model, other)
    zoo.ours([model], x, y, epochs=1)
    zoo.alone(other, x, y, epochs=1)
    zoo.assert_same_model(model, other)


def test_a_list_of_models_and_shared_data():
    x, y = zoo.arrays(5)
    results = zoo.ours([zoo.sequential(seed=i) for i in range(3)], x, y)
    assert [result.name for result in results] == ["0", "1", "2"]
    assert len({result.history["loss"] for result in results}) == 3


def test_each_gives_every_argument_by_name():
    x, y = zoo.arrays(5)
    models = {"a": zoo.sequential(), "b": zoo.sequential()}
    epochs = carpool.each(a=1, b=3)
    weights = carpool.each(a=None, b={0: 2.0})
    results = zoo.ours(models, x, y, epochs=epochs, class_weight=weights)
    zoo.assert_history(results["a"].history, zoo.alone(zoo.sequential(), x, y, epochs=1))
    zoo.assert_history(results["b"].history, zoo.alone(zoo.sequential(), x, y, class_weight={0: 2.0}))


@pytest.mark.parametrize("strategy", ["in_turn", "interleaved"])
def test_every_strategy_gives_the_same(strategy):
    x, y = zoo.arrays(5)
    arguments = {"validation_split": 0.3, "shuffle": True, "seed": 3}
    fused = zoo.ours([zoo.sequential(seed=i) for i in range(2)], x, y, strategy="fused", **arguments)
    other = zoo.ours([zoo.sequential(seed=i) for i in range(2)], x, y, strategy=strategy, **arguments)
    for one, two in zip(fused, other, strict=True):
        zoo.assert_history(one.history, two.history)
        zoo.assert_same_model(one.model, two.model)


def test_a_pydataset_is_shuffled_batch_by_batch_in_the_published_order():
    x, y = zoo.arrays(5, samples=24)
    reference, model = zoo.sequential(), zoo.sequential()
    losses = []
    for epoch in range(2):
        order = np.concatenate([np.arange(8) + 8 * i for i in carpool.batch_order(4, epoch, 3)])
        losses += zoo.alone(reference, x[order], y[order], epochs=1)["loss"]
    job = carpool.Job(model, Batches(x, y), epochs=2, seed=4)
    result = carpool.train([job], reporters=[], device="cpu")[0]
    np.testing.assert_allclose(result.history["loss"], losses, rtol=zoo.RTOL)
