"""The console reporter: a live display that fits a terminal, few plain lines in a log."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable

import pytest
import rich.console

from carpool.events import (
    EpochEnded,
    GroupAdvanced,
    GroupCompiled,
    GroupFellBack,
    GroupResized,
    GroupStarted,
    GroupVerified,
    JobAdmitted,
    JobEnded,
    JobFailed,
    PreparationBegan,
    RunEnded,
    RunStarted,
)
from carpool.fidelity import Proof
from carpool.planning.plan import Plan
from carpool.reporters import default
from carpool.reporters.console import Console
from carpool.reporters.display import frame
from carpool.reporters.tally import Tally
from carpool.result import Outcome

MakePlan = Callable[..., Plan]


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> rich.console.Console:
    monkeypatch.setenv("TERM", "xterm-256color")
    return rich.console.Console(
        file=io.StringIO(), force_terminal=True, force_interactive=True, width=100, height=30
    )


@pytest.fixture
def log() -> rich.console.Console:
    return rich.console.Console(file=io.StringIO(), force_terminal=False, force_interactive=False, width=80)


def text(console: rich.console.Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def drawn(tally: Tally, height: int = 30, width: int = 100) -> list[str]:
    """The display's lines as a terminal of this size would get them."""
    console = rich.console.Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(frame(tally, pace=1234.0, elapsed_s=3.0, height=height))
    return text(console).splitlines()


def running(plan: Plan) -> Tally:
    tally = Tally()
    tally.take(RunStarted(plan, "cpu", 1000))
    for number, group in enumerate(plan.groups):
        for position, name in enumerate(group.names):
            tally.take(EpochEnded(name, 1, {"loss": 1.0, "val_loss": 1.0 + position + 100 * number}))
    return tally


def test_five_jobs_are_all_shown(plan_of: MakePlan) -> None:
    lines = drawn(running(plan_of(1, 5)))
    assert lines[0].startswith("carpool on cpu: 0 of 5 jobs done, 5 running, 0 waiting")
    assert "1,234 member-steps/s" in lines[0]
    assert lines[1].startswith("group 0  fused 5")
    assert [line.split()[:3] for line in lines[3:]] == [[f"s0,m{m}", "running", "2/5"] for m in range(5)]
    assert lines[2].split() == ["job", "state", "epoch", "val_loss", "loss"]


def test_a_thousand_jobs_become_a_leaderboard(plan_of: MakePlan) -> None:
    lines = drawn(running(plan_of(4, 250)))
    assert len(lines) < 30
    assert "1000 jobs done" in lines[0]
    assert [line.split()[0] for line in lines[6:16]] == [f"s0,m{m}" for m in range(10)]
    assert lines[16].strip() == "and 990 more"


def test_a_thousand_groups_are_summed_up(plan_of: MakePlan) -> None:
    tally = running(plan_of(1000, 1))
    tally.take(GroupStarted(700, ("s700,m0",), "in_turn"))
    lines = drawn(tally)
    assert len(lines) < 30
    assert any(line.startswith("group 700 ") for line in lines)  # what runs is shown before what waits
    assert any(line.startswith("and 993 more groups") for line in lines)
    assert lines[-1].strip() == "and 990 more"


@pytest.mark.parametrize("height", [4, 6, 10, 15, 24])
@pytest.mark.parametrize(("structures", "members"), [(1, 5), (1, 12), (4, 250), (1000, 1)])
def test_the_display_fits_the_terminal(plan_of: MakePlan, structures: int, members: int, height: int) -> None:
    assert len(drawn(running(plan_of(structures, members)), height)) < height


def test_long_names_and_brackets_stay_on_one_line() -> None:
    tally = Tally()
    tally.take(EpochEnded("[red]" + "x" * 200, 0, {"loss": 1.0}))
    lines = drawn(tally, width=60)
    assert len(lines) == 3
    assert lines[2].startswith("[red]xxx")


NASTY = "[red]\x1b[31mx\x07\n\u202e[/red]"
SHOWN = r"[red]\x1b[31mx\x07\n\u202e[/red]"


def test_what_users_wrote_is_shown_without_what_a_terminal_takes_for_orders(
    plan_of: MakePlan, log: rich.console.Console, terminal: rich.console.Console
) -> None:
    """Names of jobs and metrics and texts of errors, on the console, in the display and in the plan's words."""
    plan = plan_of(1, 2, rejected=(NASTY,))
    for console in (log, terminal):
        show = Console(console=console)
        show(RunStarted(plan, "cpu", 50))
        show(EpochEnded(f"ends {NASTY}", 0, {"loss": 0.5, NASTY: 0.25}))
        show(JobFailed(f"fails {NASTY}", RuntimeError(NASTY)))
        show(GroupFellBack(0, ("s0,m0",), NASTY))
        show(RunEnded(1.0))
        written = text(console)
        assert NASTY not in written
        assert "\x07" not in written
        assert f"failed: fails {SHOWN}: RuntimeError: " in written
        assert f"best loss 0.5 (ends {SHOWN})" in written
    assert "\x1b" not in text(log)
    tally = running(plan)
    tally.take(EpochEnded(NASTY, 0, {"loss": 0.5, NASTY: 0.25}))
    tally.take(GroupFellBack(0, ("s0,m0",), NASTY))
    shown = "\n".join(drawn(tally, 40))
    assert shown.count(SHOWN) >= 2
    assert "\x1b" not in shown
    assert f"cannot run: {SHOWN}: ValueError: no data" in plan.explain()


def test_a_job_without_metrics_is_counted(plan_of: MakePlan) -> None:
    tally = Tally()
    tally.take(RunStarted(plan_of(1, 40), "cpu", 1000))
    assert drawn(tally)[-1].strip() == "40 jobs, none with a metric yet"


@pytest.mark.parametrize(("structures", "members"), [(1, 5), (4, 250)])
def test_a_terminal_gets_a_display_that_ends(
    plan_of: MakePlan, terminal: rich.console.Console, structures: int, members: int
) -> None:
    plan = plan_of(structures, members)
    show = Console(console=terminal)
    show(RunStarted(plan, "cpu", 1000))
    for group in plan.groups:
        for name in group.names:
            show(JobAdmitted(name, 0, 100))
            show(EpochEnded(name, 0, {"val_loss": 0.5}))
            show(JobEnded(name, Outcome.COMPLETED, 25))
    show(RunEnded(2.0))
    written = text(terminal)
    assert f"{structures * members} of {structures * members} jobs done" in written
    assert ("and 990 more" in written) == (members > 12)
    assert written.endswith("best val_loss 0.5 (s0,m0)\n")
    assert "\x1b[?25h" in written  # the cursor is back
    assert show._live is None


def test_close_gives_the_terminal_back_after_an_exception(
    plan_of: MakePlan, terminal: rich.console.Console
) -> None:
    show = Console(console=terminal)
    show(RunStarted(plan_of(1, 2), "cpu", 50))
    assert show._live is not None
    show.close()
    show.close()
    assert show._live is None
    assert "\x1b[?25h" in text(terminal)


def test_a_failure_is_said_above_the_display(plan_of: MakePlan, terminal: rich.console.Console) -> None:
    show = Console(console=terminal)
    show(RunStarted(plan_of(1, 3, rejected=("bad",)), "cpu", 50))
    show(JobFailed("s0,m1", RuntimeError("boom")))
    show(GroupFellBack(0, ("s0,m0", "s0,m2"), "a mismatch"))
    show(RunEnded(1.0))
    assert "failed: bad: ValueError: no data" in text(terminal)
    assert "failed: s0,m1: RuntimeError: boom" in text(terminal)
    assert "2 jobs go on one by one: a mismatch" in text(terminal)


def test_a_log_gets_few_lines(plan_of: MakePlan, log: rich.console.Console) -> None:
    clock = FakeClock()
    show = Console(clock=clock, console=log)
    plan = plan_of(1, 4, epochs=100)
    show(RunStarted(plan, "cpu", 2000))
    show(GroupStarted(0, plan.groups[0].names, "fused"))
    show(GroupCompiled(0, 8, 4, "compiled", 5.0))
    show(GroupVerified(0, 4, 1e-7))
    show(GroupVerified(0, 4, 2e-7))  # verify=True goes on checking, a line each time would be too many
    for epoch in range(100):
        clock.now_s += 0.25
        show(GroupAdvanced(0, 20))
        for name in plan.groups[0].names:
            show(EpochEnded(name, epoch, {"loss": 1.0 / (epoch + 1)}))
    show(GroupResized(0, 4, 2))
    for name in plan.groups[0].names:
        show(JobEnded(name, Outcome.COMPLETED, 500))
    show(RunEnded(25.0))
    show.close()
    assert text(log).splitlines() == [
        "4 jobs in 1 group on cpu: 4 fused; 2,000 steps",
        "group 0: started, 4 jobs fused",
        "group 0: compiled for 4 members and batches of 8 in 5.0 s",
        "group 0: first step verified against 4 alone, largest difference 1.0e-07",
        "0 of 4 jobs done, 4 running, 0 waiting; 40 % of steps; 80 member-steps/s; 10.0 s",
        "0 of 4 jobs done, 4 running, 0 waiting; 80 % of steps; 80 member-steps/s; 20.0 s",
        "group 0: repacked from 4 to 2 members",
        "4 jobs: 4 completed; 2,000 member-steps in 25.0 s; 5.0 s of it preparing; best loss 0.01 (s0,m0)",
    ]


def test_a_log_says_that_traces_were_compared_and_no_step_was_run(
    plan_of: MakePlan, log: rich.console.Console
) -> None:
    show = Console(clock=FakeClock(), console=log)
    plan = plan_of(1, 4)
    show(RunStarted(plan, "cpu", 20))
    show(GroupVerified(0, 4, 0.0, Proof.TRACES))
    assert text(log).splitlines()[1:] == [
        "group 0: the steps of 4 members have equal traces; none was run alone"
    ]


def test_a_log_of_a_thousand_failures_stays_short(plan_of: MakePlan, log: rich.console.Console) -> None:
    show = Console(clock=FakeClock(), console=log)
    plan = plan_of(1000, 1)
    show(RunStarted(plan, "cpu", 1000))
    for number, group in enumerate(plan.groups):
        show(GroupStarted(number, group.names, group.strategy))
        show(JobFailed(group.names[0], RuntimeError("boom")))
        show(JobEnded(group.names[0], Outcome.FAILED, 0))
    show(RunEnded(1.0))
    lines = text(log).splitlines()
    assert len(lines) == 12
    assert lines[1] == "failed: s0,m0: RuntimeError: boom"
    assert lines[-1] == "1,000 jobs: 1000 failed; 0 member-steps in 1.0 s"


def test_one_console_can_report_run_after_run(plan_of: MakePlan, log: rich.console.Console) -> None:
    show = Console(clock=FakeClock(), console=log)
    for _ in range(2):
        show(RunStarted(plan_of(1, 1), "cpu", 25))
        show(JobEnded("s0,m0", Outcome.COMPLETED, 25))
        show(RunEnded(1.0))
        show.close()
    first, second = text(log).splitlines()[:2], text(log).splitlines()[2:]
    assert first == second


def test_taking_an_epoch_is_cheap(plan_of: MakePlan, terminal: rich.console.Console) -> None:
    show = Console(console=terminal)
    show(RunStarted(plan_of(1, 1000), "cpu", 25000))
    events = [EpochEnded(f"s0,m{m}", 0, {"loss": 1.0, "val_loss": 1.0}) for m in range(1000)]
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        for event in events:
            show(event)
    finally:
        sys.setprofile(None)
    show.close()
    assert calls / len(events) < 30  # and no drawing, which is thousands


def test_the_default_is_the_console() -> None:
    assert [type(reporter) for reporter in default()] == [Console]


def test_a_long_preparation_says_what_is_waited_for(log: rich.console.Console) -> None:
    show = Console(console=log)
    show(PreparationBegan("planning 3 jobs"))
    watch = show._watch
    assert watch is not None
    watch.wait_for("planning 3 jobs")
    watch._next_s = 0.0  # as after a while
    watch.look()
    show.close()
    assert "carpool: planning 3 jobs ..." in text(log)


def test_a_short_preparation_says_nothing(log: rich.console.Console, plan_of: MakePlan) -> None:
    show = Console(console=log)
    show(PreparationBegan("planning 3 jobs"))
    show(RunStarted(plan_of(1, 2), "cpu", 10))
    watch = show._watch
    assert watch is not None
    watch._next_s = 0.0
    watch.look()
    show.close()
    assert "planning" not in text(log)
    assert not [thread for thread in threading.enumerate() if thread.name == "carpool-watch"]
