import math

from autoprec.tune.trials.judge import Judge


def _run(losses, step_s, baseline_s=0.01, budget=0.005):
    """The verdict, and the steps done, of a run with these losses and seconds; the reference loss is 1."""
    seconds: list[float] = []
    judge = Judge(
        lambda so_far: sum(so_far) / len(so_far) - 1,
        budget,
        seconds,
        None if baseline_s is None else lambda: baseline_s,
    )
    so_far: list[float] = []
    for loss, step in zip(losses, step_s, strict=True):
        seconds.append(step)
        so_far.append(loss)
        if judge(so_far):
            break
    return judge.verdict, len(so_far)


def test_a_run_that_may_win_goes_on():
    assert _run([1.0] * 20, [0.01] * 20) == ("", 20)


def test_a_hopeless_loss_ends_after_five_steps():
    verdict, steps = _run([1.1] * 20, [0.01] * 20)
    assert (steps, verdict) == (5, "stopped after 5 steps at 20.0 times the loss budget")


def test_a_loss_that_is_not_finite_ends_at_once():
    assert _run([1.0, math.nan, 1.0], [0.01] * 3) == ("", 2)


def test_a_slow_step_must_be_slow_twice():
    assert _run([1.0] * 20, [0.02] * 20)[1] == 8
    assert _run([1.0] * 20, [0.02] * 5 + [0.01] * 15) == ("", 20)  # a neighbour was the cause
    assert _run([1.0] * 20, [0.01] * 5 + [0.02] * 15) == ("", 20)


def test_where_a_step_time_says_nothing_only_the_loss_is_judged():
    assert _run([1.0] * 20, [9.0] * 20, baseline_s=None) == ("", 20)
