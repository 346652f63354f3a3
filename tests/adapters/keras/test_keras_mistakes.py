"""The most common mistakes with Keras models: each gets one error that says what was expected, what came and what to do."""

from __future__ import annotations

from typing import Any

import keras_zoo as zoo
import numpy as np
import pytest

import carpool
from carpool.errors import CarpoolError, DataError, ModelError

x, y = np.ones((26, 5), "float32"), np.zeros(26, "int32")


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (np.arange(26) < 9, None),
        ([True, False], "index as a mask of 26"),
        ([0.0, 1.0], "index of whole numbers"),
        ([[0, 1]], "index in one dimension"),
    ],
)
def test_an_index_is_positions_or_a_mask(index: Any, said: str | None):
    job = carpool.Job(zoo.sequential(), (x, y), name="a", index=index)
    if said is None:
        assert "26" not in carpool.plan([job], device="cpu").explain()
        return
    with pytest.raises(DataError, match=rf"^Job 'a': Expected {said}"):
        carpool.plan([job], device="cpu")


@pytest.mark.parametrize("is_built", [False, True])
def test_data_of_another_width_is_refused_with_what_keras_says(
    is_built: bool, capfd: pytest.CaptureFixture[str]
):
    model = zoo.sequential()
    if is_built:
        model.fit(x, y, verbose=0)
    with pytest.raises(
        DataError, match=r"^Job 'a': Expected data that its model takes. Received: .*6.*each"
    ) as caught:
        carpool.fit({"a": model}, np.ones((26, 6), "float32"), y)
    assert "\x1b" not in str(caught.value)
    assert is_built or "Input 0" in str(caught.value.__cause__)
    assert capfd.readouterr() == ("", "")


def test_an_index_beside_batches_is_refused():
    def batches():
        yield x[:4], y[:4]

    job = carpool.Job(zoo.sequential(), batches(), name="a", index=[0, 1])
    with pytest.raises(DataError, match=r"^Job 'a': Expected index= beside arrays. Received: generator"):
        carpool.plan([job], device="cpu")


# Data for each model, in the form that the models have


def different(rate: float = 0.05) -> Any:
    return zoo.sequential(rate=rate)


OTHER_X, OTHER_Y = np.linspace(0, 1, 130, dtype="float32").reshape(26, 5), np.arange(26, dtype="int32") % 3
FORMS: dict[str, tuple[Any, Any, Any]] = {
    "lists": (["0", "1"], [x, OTHER_X], [y, OTHER_Y]),
    "dicts": (["a", "b"], {"a": x, "b": OTHER_X}, {"b": OTHER_Y, "a": y}),
    "each in order": (["a", "b"], carpool.each(x, OTHER_X), carpool.each(y, OTHER_Y)),
    "each of a dict": (
        ["a", "b"],
        carpool.each({"b": OTHER_X, "a": x}),
        carpool.each({"a": y, "b": OTHER_Y}),
    ),
    "each of a list": (["0", "1"], carpool.each({0: x, 1: OTHER_X}), carpool.each(y, OTHER_Y)),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_model_has_its_own_data(form: str):
    names, given_x, given_y = FORMS[form]
    made = [different(), different()]
    models = made if names[0] == "0" else dict(zip(names, made, strict=True))
    results = zoo.ours(models, given_x, given_y, epochs=2)
    for name, own_x, own_y in zip(names, (x, OTHER_X), (y, OTHER_Y), strict=True):
        expected = zoo.alone(different(), own_x, own_y, epochs=2)
        zoo.assert_history(results[name].history, expected)


def test_validation_data_and_epochs_may_be_by_name_too():
    models = {"a": different(), "b": different()}
    checked = {"a": (x, y), "b": (OTHER_X, OTHER_Y)}
    results = carpool.fit(models, x, y, epochs={"a": 1, "b": 2}, validation_data=checked, reporters=[])
    assert [len(results[name].history["val_loss"]) for name in "ab"] == [1, 2]


def two_inputs() -> Any:
    import keras

    left, right = keras.Input((5,), name="a"), keras.Input((5,), name="b")
    model = keras.Model({"a": left, "b": right}, keras.layers.Dense(1)(keras.layers.add([left, right])))
    model.compile("sgd", "mse")
    return model


def test_a_list_or_dict_that_is_one_models_input_is_for_all_models():
    target = np.ones((26, 1), "float32")
    listed = carpool.fit([two_inputs(), two_inputs()], {"a": x, "b": x}, target, reporters=[])
    named = carpool.fit({"a": two_inputs(), "b": two_inputs()}, {"a": x, "b": x}, target, reporters=[])
    assert len(listed.failed) == len(named.failed) == 0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: carpool.each(x), "x=carpool.each(...) with 2 values, one for each model. Received: 1"),
        (lambda: carpool.each(a=x, B=x), "names out of a, b. Received: 'B'. Remedy: did you mean 'b'?"),
        (lambda: carpool.each(x, b=x), "values by name, or values in order. Received: both"),
    ],
)
def test_each_has_a_value_for_each(make: Any, said: str):
    with pytest.raises(CarpoolError) as caught:
        carpool.fit({"a": different(), "b": different()}, make(), y)
    assert said in str(caught.value)


def test_a_model_of_another_framework_is_refused():
    torch = pytest.importorskip("torch")
    for model, word in ((torch.nn.Linear(5, 3), "Linear of torch"), (3, "int"), ({"w": x}, "dict")):
        with pytest.raises(
            ModelError, match=rf"^Job 'a': Expected a compiled Keras model\. Received: {word}.*carpool\.train"
        ):
            carpool.fit({"a": model}, x, y)


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("batchsize", "did you mean 'batch_size'?"),
        ("colour", "leave it out."),
        ("epoch", "did you mean 'epochs'?"),
    ],
)
def test_an_argument_that_fit_does_not_have(word: str, remedy: str):
    with pytest.raises(CarpoolError, match=rf"^Job 'a': Expected fit arguments out of .*'{word}'") as caught:
        carpool.fit({"a": different()}, x, y, **{word: 3})
    assert str(caught.value).endswith(f"Remedy: {remedy}")


def test_a_name_instead_of_a_function_is_told_of_compile():
    with pytest.raises(
        CarpoolError, match=r"^Job 'a': .*torch\.optim\.Adam, .*a Keras model has its own in compile"
    ):
        carpool.Job(different(), (x, y), name="a", optimizer="adam")
