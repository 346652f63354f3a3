"""The promise, for TensorFlow 1 graphs.

What of the suite is about stacks does not fit: graphs are never stacked, so nothing fuses, clips in a stack or leaves one. A graph goes on after a NaN,
as sessions do. Its learning rates and clipping are in the graph itself.
"""

from __future__ import annotations

from graph_zoo import DATA, MODELS, OPTIMIZERS, SCHEDULERS, builder, plain_loop

import carpool
from carpool.job import Job
from carpool.result import Outcome, Result
from carpool.tensorflow import Graph
from carpool.testing import AdapterConformance, Reference, Variant


class TestGraphs(AdapterConformance):
    models = tuple(MODELS)
    optimizers = tuple(OPTIMIZERS)
    schedulers = tuple(SCHEDULERS)
    clip_norms = ()
    ends_at_nan = Outcome.COMPLETED
    fast_cases = 2
    test_a_live_model_goes_on_where_it_was_every_optimizer = None  # type: ignore[assignment]  # it asks for strategy="fused": see below

    def job(self, model: str, optimizer: str, scheduler: str, variant: Variant, double: bool = True) -> Job:
        dtype = "float64" if double else "float32"
        graph = Graph(
            builder(model, optimizer, scheduler, 0.01 * variant.scale, dtype), ["loss"], train_op="train"
        )
        return Job(
            graph, DATA[dtype], seed=variant.seed, epochs=variant.epochs, batch_size=16, **variant.options
        )

    def reference(self, job: Job) -> Reference:
        return plain_loop(job)

    def left(self, result: Result) -> Reference:
        return Reference(result.model.variables, {}, [], result.history["loss"])

    def continued(self, job: Job, result: Result) -> Job:
        return job

    def reference_continued(self, job: Job) -> Reference:
        return plain_loop(job, passes=2)

    def test_a_graph_goes_on_where_it_was(self) -> None:
        jobs = self.jobs("dense", "adam", "decay", epochs=6)
        self.run(jobs)
        again = self.run(jobs)
        for job, result in zip(jobs, again, strict=True):
            assert result.model is job.model
            self_left, expected = self.left(result), self.reference_continued(job)
            assert list(self_left.history) == list(expected.history)
            assert all((self_left.weights[name] == expected.weights[name]).all() for name in expected.weights)

    def test_a_neighbour_that_turns_nan_changes_no_bit(self) -> None:
        sound = self.run(self.jobs("dense", "sgd", "constant"))
        changed = self.jobs("dense", "sgd", "constant")
        changed[1] = self.job("dense", "sgd", "constant", Variant(1, float("inf")))
        broken = carpool.train(changed, device="cpu", reporters=[])
        assert broken[1].outcome is self.ends_at_nan
        for place in (0, 2):
            for name, value in sound[place].model.variables.items():
                assert (broken[place].model.variables[name] == value).all()
