import numpy as np
import optuna
import pytest

from autoprec.graph.site import Site
from autoprec.plan import Plan
from autoprec.tune.sampler import CONSTRAINT, SPEED_SD, PlanSampler, prior
from autoprec.tune.space import build_space

BUDGET = 1.0
CHOICES = ("fp32", "bf16", "fp8_e4m3")


class Table:
    """Time and gap of every mix: sums over groups, with pairs that don't add up, and a prior that is off."""

    def __init__(self, num_groups: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.names = [f"g{k}" for k in range(num_groups)]
        share = rng.dirichlet(np.ones(num_groups))
        self.time = -share[:, None] * np.array([0.0, 0.4, 0.6]) * rng.uniform(0.6, 1.2, (num_groups, 3))
        self.gap = rng.lognormal(0, 1, (num_groups, 1)) * np.array([0.0, 0.03, 0.5]) / num_groups * 4
        self.pairs = rng.normal(0, 0.01, (num_groups, num_groups, 3, 3))
        self.pairs[:, :, 0, :] = self.pairs[:, :, :, 0] = 0
        off = rng.lognormal(0, 0.6, (num_groups, 3))
        self.prior = (self._named(self.gap * off), self._named(self.time))

    def _named(self, values: np.ndarray) -> dict[str, dict[str, float]]:
        return {n: dict(zip(CHOICES, map(float, row), strict=True)) for n, row in zip(self.names, values, strict=True)}

    def measure(self, params: dict[str, str]) -> tuple[float, float]:
        chosen = [CHOICES.index(params[n]) for n in self.names]
        rows = range(len(chosen))
        pairs = sum(self.pairs[i, j, chosen[i], chosen[j]] for i in rows for j in rows if i < j)
        return 1 / (1 + self.time[rows, chosen].sum()), self.gap[rows, chosen].sum() + pairs * BUDGET

    def optimum(self) -> float:
        grid = np.stack(np.meshgrid(*[range(3)] * len(self.names), indexing="ij"), -1).reshape(-1, len(self.names))
        rows = [self.measure({n: CHOICES[k] for n, k in zip(self.names, mix, strict=True)}) for mix in grid]
        return max(speed for speed, gap in rows if gap <= BUDGET)


def _study(table: Table, sampler: optuna.samplers.BaseSampler, trials: int) -> optuna.Study:
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.enqueue_trial(dict.fromkeys(table.names, "fp32"))
    study.enqueue_trial(dict.fromkeys(table.names, "bf16"))
    for _ in range(trials):
        trial = study.ask()
        params = {name: trial.suggest_categorical(name, CHOICES) for name in table.names}
        speed, gap = table.measure(params)
        trial.set_constraint(CONSTRAINT, gap - BUDGET)
        study.tell(trial, speed)
    return study


def _best(study: optuna.Study) -> float:
    return max(t.value for t in study.trials if t.constraints[CONSTRAINT] <= 0)


@pytest.fixture(autouse=True)
def quiet():
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def test_the_optimum_is_found_in_few_trials_and_no_mix_twice():
    shares = []
    for seed in range(5):
        table = Table(6, seed)
        study = _study(table, PlanSampler(*table.prior, budget=BUDGET, seed=seed), trials=30)
        mixes = [tuple(t.params.values()) for t in study.trials]
        assert len(set(mixes)) == 30
        shares.append(_best(study) / table.optimum())
    assert np.median(shares) > 0.99


def test_a_space_too_large_to_list_is_searched_better_than_at_random():
    won = 0
    for seed in range(3):
        table = Table(24, seed)
        ours = _best(_study(table, PlanSampler(*table.prior, budget=BUDGET, seed=seed), trials=30))
        random = _best(_study(table, optuna.samplers.RandomSampler(seed=seed), trials=30))
        won += ours > random
    assert won == 3


def test_a_diverged_trial_does_not_blind_it():
    table = Table(4, 0)
    table.gap[0, 1:] = 1e9
    study = _study(table, PlanSampler(*table.prior, budget=BUDGET, seed=0), trials=30)
    assert _best(study) > 0.99 * table.optimum()


def test_the_same_seed_proposes_the_same():
    runs = []
    for _ in range(2):
        table = Table(5, 1)
        runs.append([t.params for t in _study(table, PlanSampler(*table.prior, budget=BUDGET, seed=3), 12).trials])
    assert runs[0] == runs[1]


def test_when_every_mix_was_measured_it_still_proposes_one():
    table = Table(1, 0)
    study = _study(table, PlanSampler(*table.prior, budget=BUDGET, seed=0), trials=5)
    assert {t.params["g0"] for t in study.trials} == set(CHOICES)


def test_other_parameters_are_sampled_too():
    table = Table(3, 0)
    study = optuna.create_study(direction="maximize", sampler=PlanSampler(*table.prior, budget=BUDGET))
    for _ in range(6):
        trial = study.ask()
        params = {name: trial.suggest_categorical(name, CHOICES) for name in table.names}
        scale = trial.suggest_categorical("scaler.init_scale", [64.0, 1024.0])
        trial.set_constraint(CONSTRAINT, table.measure(params)[1] - BUDGET)
        study.tell(trial, scale)
    assert {"g0", "scaler.init_scale"} <= study.trials[-1].params.keys()


def test_the_posterior_smooths_a_lucky_reading():
    table = Table(5, 2)
    rng = np.random.default_rng(0)
    sampler = PlanSampler(*table.prior, budget=BUDGET, seed=0)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    truth = {}
    for _ in range(40):
        trial = study.ask()
        speed, gap = table.measure({name: trial.suggest_categorical(name, CHOICES) for name in table.names})
        truth[trial.number] = speed
        trial.set_constraint(CONSTRAINT, gap - BUDGET)
        trial.set_user_attr(SPEED_SD, 0.08)
        study.tell(trial, speed * (1 + 0.08 * rng.standard_normal()))
    believed = sampler.posterior(study.trials)
    raw = np.array([t.value - truth[t.number] for t in study.trials])
    smooth = np.array([believed[t.number].speedup - truth[t.number] for t in study.trials])
    assert np.abs(smooth).mean() < 0.7 * np.abs(raw).mean()


def test_a_trial_that_was_not_timed_says_nothing_about_time():
    table = Table(3, 0)
    sampler = PlanSampler(*table.prior, budget=BUDGET, seed=0)
    study = _study(table, sampler, trials=8)
    before = sampler.posterior(study.trials)
    trial = study.ask()  # a mix that wasn't measured yet
    for name in table.names:
        trial.suggest_categorical(name, CHOICES)
    trial.set_constraint(CONSTRAINT, 9.0)
    study.tell(trial, 0.0)
    after = sampler.posterior(study.trials)
    assert all(after[number].speedup == pytest.approx(belief.speedup) for number, belief in before.items())
    assert after[trial.number].loss_gap > 0.5


def test_the_prior_ranks_formats_by_their_error():
    space = build_space(
        [Site(module=name, op="linear", leaf=True, flops=10, num_params=n) for name, n in (("a", 1), ("b", 2))],
        Plan(rules=()),
        ("fp8_e4m3", "bf16", "fp16"),
        low_format="bf16",
    )
    harms, times = prior(space)
    assert harms["a"]["fp32"] == times["a"]["fp32"] == 0
    assert harms["a"]["fp16"] < harms["a"]["bf16"] < harms["a"]["fp8_e4m3"]
    assert times["a"]["fp8_e4m3"] < times["a"]["bf16"] == times["a"]["fp16"] < 0
    assert set(harms) == set(times) == {group.name for group in space.groups}


def test_the_scalers_numbers_follow_the_loss():
    """Speed doesn't depend on them; the loss is good at one value only."""
    table = Table(2, 0)
    study = optuna.create_study(direction="maximize", sampler=PlanSampler(*table.prior, budget=BUDGET, seed=0))
    scales = [2.0**k for k in range(5, 12)]
    for _ in range(40):
        trial = study.ask()
        speed, gap = table.measure({name: trial.suggest_categorical(name, CHOICES) for name in table.names})
        scale = trial.suggest_categorical("scaler.init_scale", scales)
        trial.set_constraint(CONSTRAINT, gap + (0 if scale == 256.0 else 3) - BUDGET)
        study.tell(trial, speed)
    late = [t.params["scaler.init_scale"] for t in study.trials[-15:]]
    assert late.count(256.0) >= 6  # 2 at random
    assert len(study.sampler.posterior(study.trials)) == 9  # one belief a mix: that of its best scaler
