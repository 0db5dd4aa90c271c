import numpy as np
import optuna
import pytest

from autoprec.tune.sampling.objective import Objective
from autoprec.tune.sampling.sampler import CONSTRAINT, REPEAT, SPEED_SD, PlanSampler

BUDGET = 1.0
CHOICES = ("fp32", "bf16", "fp8_e4m3")


class Table:
    """Sums over groups, with pairs that don't add up, and a prior that is off."""

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

    def all(self) -> list[tuple[float, float]]:
        """Speed and gap of every mix."""
        grid = np.stack(np.meshgrid(*[range(3)] * len(self.names), indexing="ij"), -1).reshape(-1, len(self.names))
        return [self.measure({n: CHOICES[k] for n, k in zip(self.names, mix, strict=True)}) for mix in grid]

    def optimum(self) -> float:
        return max(speed for speed, gap in self.all() if gap <= BUDGET)


def ask(table: Table, study: optuna.Study) -> tuple[optuna.Trial, dict[str, str]]:
    trial = study.ask()
    return trial, {name: trial.suggest_categorical(name, CHOICES) for name in table.names}


def new_study(table: Table, sampler: optuna.samplers.BaseSampler, **kwargs) -> optuna.Study:
    study = optuna.create_study(direction="maximize", sampler=sampler, **kwargs)
    study.enqueue_trial(dict.fromkeys(table.names, "fp32"))
    study.enqueue_trial(dict.fromkeys(table.names, "bf16"))
    return study


def go_on(table: Table, study: optuna.Study, trials: int, noise: float = 0.0) -> optuna.Study:
    """Run so many trials; a mix that isn't a repeat gives what it gave before."""
    for _ in range(trials):
        trial, params = ask(table, study)
        speed, gap = table.measure(params)
        gap += noise * np.random.default_rng(trial.number).standard_normal()
        trial.set_constraint(CONSTRAINT, gap - BUDGET)
        study.tell(trial, speed)
    return study


def run(table: Table, sampler: optuna.samplers.BaseSampler, trials: int, noise: float = 0.0) -> optuna.Study:
    return go_on(table, new_study(table, sampler), trials, noise)


def best(study: optuna.Study) -> float:
    return max(t.value for t in study.trials if t.constraints[CONSTRAINT] <= 0)


def origins(study: optuna.Study) -> list[str | None]:
    return [t.system_attrs.get("autoprec:origin") for t in study.trials]


def assert_repeats_are_marked(study: optuna.Study) -> None:
    """No mix comes twice unless it says that it is a repeat, and no repeat is new."""
    seen = set()
    for trial in study.trials:
        mix = tuple(trial.params.values())
        assert (mix in seen) == (trial.system_attrs.get("autoprec:origin") == REPEAT), trial.number
        seen.add(mix)


@pytest.fixture(autouse=True)
def quiet():
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def test_the_optimum_is_found_in_few_trials_and_no_mix_twice():
    shares = []
    for seed in range(5):
        table = Table(6, seed)
        study = run(table, PlanSampler(*table.prior, BUDGET, seed=seed), trials=30)
        assert_repeats_are_marked(study)
        assert "repeat" not in origins(study)
        shares.append(best(study) / table.optimum())
    assert np.median(shares) > 0.99


def test_a_space_too_large_to_list_is_searched_better_than_at_random():
    for seed in range(3):
        table = Table(24, seed)
        study = run(table, PlanSampler(*table.prior, BUDGET, seed=seed), trials=20)
        assert_repeats_are_marked(study)
        assert best(study) > best(run(table, optuna.samplers.RandomSampler(seed=seed), trials=20))


def test_the_solved_front_comes_first_and_search_follows():
    table = Table(6, 0)
    found = origins(run(table, PlanSampler(*table.prior, BUDGET, seed=0), trials=14))
    assert found[:2] == [None, None]  # enqueued
    fronts = found.count("front")
    assert 1 <= fronts <= 6
    assert found[2 : 2 + fronts] == ["front"] * fronts
    assert set(found[2 + fronts :]) == {"search"}


def test_a_diverged_trial_does_not_blind_it():
    table = Table(4, 0)
    table.gap[0, 1:] = 1e9
    study = run(table, PlanSampler(*table.prior, BUDGET, seed=0), trials=30)
    assert best(study) > 0.99 * table.optimum()


def test_what_was_measured_counts_against_what_was_expected():
    """A mix that diverges, of choices that do no harm alone, is believed to be bad."""
    table = Table(3, 0)
    sampler = PlanSampler(*table.prior, BUDGET, seed=0)
    study = run(table, sampler, trials=8)
    before = sampler.posterior(study.trials)
    trial, _ = ask(table, study)
    trial.set_constraint(CONSTRAINT, 9.0)
    study.tell(trial, 0.0)  # 0: not timed
    after = sampler.posterior(study.trials)
    assert all(after[number].speedup == pytest.approx(belief.speedup) for number, belief in before.items())
    assert after[trial.number].loss_gap > 5


def test_the_same_seed_proposes_the_same():
    table = Table(5, 1)
    runs = [[t.params for t in run(table, PlanSampler(*table.prior, BUDGET, seed=3), 12).trials] for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_new_sampler_goes_on_where_another_stopped():
    """All state is in the trials: a study that is loaded again proposes what an uninterrupted one would."""
    table = Table(14, 1)
    storage = optuna.storages.InMemoryStorage()
    whole = run(table, PlanSampler(*table.prior, BUDGET, seed=3), 16)
    part = new_study(table, PlanSampler(*table.prior, BUDGET, seed=3), study_name="s", storage=storage)
    go_on(table, part, 5)
    for _ in range(11):
        again = optuna.load_study(study_name="s", storage=storage, sampler=PlanSampler(*table.prior, BUDGET, seed=3))
        go_on(table, again, 1)
    assert [t.params for t in again.trials] == [t.params for t in whole.trials]


@pytest.mark.parametrize("num_groups", [5, 14])
def test_workers_that_run_at_once_measure_different_mixes(num_groups: int):
    table = Table(num_groups, 0)
    study = new_study(table, PlanSampler(*table.prior, BUDGET, seed=0))
    mixes = []
    for _ in range(6):
        running = [ask(table, study) for _ in range(4)]
        mixes += [tuple(params.values()) for _, params in running]
        for trial, params in running:
            speed, gap = table.measure(params)
            trial.set_constraint(CONSTRAINT, gap - BUDGET)
            study.tell(trial, speed)
    assert len(set(mixes)) == 24
    optimum = table.optimum() if num_groups < 10 else 0.0
    assert best(study) > 0.98 * optimum


def test_a_mix_that_waits_or_was_only_proposed_is_taken():
    table = Table(2, 0)
    study = new_study(table, PlanSampler(*table.prior, BUDGET, seed=0))
    go_on(table, study, 2)
    study.enqueue_trial({"g0": "fp8_e4m3", "g1": "fp8_e4m3"})
    waiting = study.trials[2]
    other = optuna.create_study(direction="maximize", sampler=PlanSampler(*table.prior, BUDGET, seed=0))
    for trial in (*study.trials[:2], waiting):
        other.add_trial(trial)
    trial, params = ask(table, other)  # the waiting one
    assert set(params.values()) == {"fp8_e4m3"}
    proposed = other.ask()
    assert proposed.relative_params  # chosen, and not yet stored as parameters
    found = {tuple(ask(table, other)[1].values()) for _ in range(3)}
    assert tuple(proposed.relative_params.values()) not in found
    assert ("fp8_e4m3", "fp8_e4m3") not in found


def test_when_every_mix_was_measured_it_repeats():
    table = Table(1, 0)
    study = run(table, PlanSampler(*table.prior, BUDGET, seed=0), trials=5)
    assert {t.params["g0"] for t in study.trials} == set(CHOICES)
    assert_repeats_are_marked(study)


def test_noise_makes_it_repeat_what_could_still_win_but_not_for_ever():
    table = Table(5, 0)
    study = run(table, PlanSampler(*table.prior, BUDGET, noise=0.3, seed=0), trials=40, noise=0.3)
    assert_repeats_are_marked(study)
    repeated = [tuple(t.params.values()) for t in study.trials if t.system_attrs.get("autoprec:origin") == "repeat"]
    assert repeated
    assert max(map(repeated.count, repeated)) < 6


def test_repeats_of_a_plan_count_as_their_mean():
    table = Table(3, 0)
    sampler = PlanSampler(*table.prior, BUDGET, noise=0.5)
    study = run(table, sampler, trials=6)
    params = study.trials[-1].params
    sds = []
    for gap in (0.9, 0.5, 0.7, 0.7, 0.7):
        sds.append(sampler.posterior(study.trials)[5].loss_gap_sd)
        study.enqueue_trial(params)
        trial, _ = ask(table, study)
        study._storage.set_trial_system_attr(trial._trial_id, "autoprec:origin", "repeat")
        trial.set_constraint(CONSTRAINT, gap - BUDGET)
        study.tell(trial, study.trials[5].value)
    assert sds == sorted(sds, reverse=True)
    believed = sampler.posterior(study.trials)
    assert believed[5] == believed[trial.number]


def test_a_copied_trial_tells_nothing_new():
    table = Table(3, 0)
    sampler = PlanSampler(*table.prior, BUDGET, noise=0.5)
    study = run(table, sampler, trials=6)
    before = sampler.posterior(study.trials)
    study.enqueue_trial(study.trials[-1].params)
    go_on(table, study, 1)
    after = sampler.posterior(study.trials)
    assert after[6] == after[5] == before[5]


def test_the_posterior_smooths_a_lucky_reading():
    table = Table(5, 2)
    rng = np.random.default_rng(0)
    sampler = PlanSampler(*table.prior, BUDGET, seed=0)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    truth = {}
    for _ in range(40):
        trial, params = ask(table, study)
        speed, gap = table.measure(params)
        truth[trial.number] = speed
        trial.set_constraint(CONSTRAINT, gap - BUDGET)
        trial.set_user_attr(SPEED_SD, 0.08)
        study.tell(trial, speed * (1 + 0.08 * rng.standard_normal()))
    believed = sampler.posterior(study.trials)
    raw = np.array([t.value - truth[t.number] for t in study.trials])
    smooth = np.array([believed[t.number].speedup - truth[t.number] for t in study.trials])
    assert np.abs(smooth).mean() < 0.7 * np.abs(raw).mean()


def test_a_prediction_gets_better_with_trials():
    table = Table(6, 3)
    sampler = PlanSampler(*table.prior, BUDGET, seed=0)
    study = run(table, sampler, trials=30)
    params = {name: CHOICES[1 + k % 2] for k, name in enumerate(table.names)}
    speed, gap = table.measure(params)
    first, last = sampler.predict(params), sampler.predict(params, study.trials)
    assert last.loss_gap_sd < first.loss_gap_sd
    assert abs(last.loss_gap - gap) < abs(first.loss_gap - gap)
    assert last.speedup == pytest.approx(speed, rel=0.02)
    assert sampler.predict({"g0": "fp32"}) is None


def test_the_lowest_loss_at_a_speed():
    table = Table(5, 0)
    wanted = Objective(kind="loss", budget=BUDGET, min_speedup=1.7)
    study = run(table, PlanSampler(*table.prior, BUDGET, objective=wanted), trials=30)
    found = min(t.constraints[CONSTRAINT] + BUDGET for t in study.trials if t.value >= 1.7)
    assert found == pytest.approx(min(gap for speed, gap in table.all() if speed >= 1.7), abs=0.01 * BUDGET)


def test_the_front_is_found_at_several_budgets():
    table = Table(5, 0)
    study = run(table, PlanSampler(*table.prior, BUDGET, objective=Objective(kind="front", budget=BUDGET)), trials=50)
    rows = [(t.value, t.constraints[CONSTRAINT] + BUDGET) for t in study.trials]
    for budget in (0.25, 0.5, 1.0, 2.0):
        optimum = max(speed for speed, gap in table.all() if gap <= budget * BUDGET)
        assert max(speed for speed, gap in rows if gap <= budget * BUDGET) > 0.99 * optimum


def test_settings_are_tried_where_a_lower_loss_would_win_and_then_kept():
    """Speed doesn't depend on them; the loss is good at one value only."""
    table = Table(4, 0)
    scales = [2.0**k for k in range(5, 12)]
    study = new_study(table, PlanSampler(*table.prior, BUDGET, seed=0, defaults={"scaler.init_scale": 32.0}))
    for _ in range(50):
        trial, params = ask(table, study)
        speed, gap = table.measure(params)
        scale = trial.suggest_categorical("scaler.init_scale", scales)
        trial.set_constraint(CONSTRAINT, gap + (0 if scale == 256.0 else 0.4) - BUDGET)
        study.tell(trial, speed)
    tried = [t for t in study.trials if "autoprec:settings" in t.system_attrs]
    assert 1 <= len(tried) <= 10
    assert study.trials[0].params["scaler.init_scale"] == 32.0
    assert {t.params["scaler.init_scale"] for t in study.trials[-5:] if t not in tried} == {256.0}


def test_a_repeat_has_the_settings_of_what_it_repeats():
    table = Table(4, 0)
    study = new_study(table, PlanSampler(*table.prior, BUDGET, noise=0.4, seed=0))
    for k in range(40):
        trial, params = ask(table, study)
        speed, gap = table.measure(params)
        trial.suggest_categorical("scaler.init_scale", [2.0**k for k in range(5, 12)])
        noise = 0.4 * np.random.default_rng(k).standard_normal()
        trial.set_constraint(CONSTRAINT, gap + noise - BUDGET)
        study.tell(trial, speed)
    plans = [tuple(t.params.values()) for t in study.trials]
    repeats = [k for k, origin in enumerate(origins(study)) if origin == "repeat"]
    assert repeats
    assert all(plans[k] in plans[:k] for k in repeats)


def test_a_default_that_is_no_choice_is_not_taken():
    table = Table(2, 0)
    study = new_study(table, PlanSampler(*table.prior, BUDGET, defaults={"scaler.init_scale": 3.0}))
    trial, _ = ask(table, study)
    assert trial.suggest_categorical("scaler.init_scale", [32.0, 64.0]) in (32.0, 64.0)
