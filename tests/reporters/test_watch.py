"""What a run waits for is said soon, and again after ten seconds; what is over is not."""

from __future__ import annotations

from carpool.reporters.watch import Watch


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_it_is_said_when_it_lasts_and_again_after_ten_seconds():
    said: list[str] = []
    clock = Clock()
    watch = Watch(said.append, clock=clock)
    watch._closed.set()  # no thread: the test looks by itself
    watch.wait_for("planning")
    for clock.now_s in (0.5, 0.9, 5.0, 10.95, 12.0):
        watch.look()
    watch.wait_for(None)
    clock.now_s = 60.0
    watch.look()
    assert said == ["planning ...", "planning ... 11 s"]
