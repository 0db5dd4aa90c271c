"""Trials per hour of one worker and of four on one journal file, where timing doesn't make them wait for each other.

    python benchmarks/many_workers.py        # some minutes; writes benchmarks/results/many_workers.json

A trial sleeps (``simulated.py``), as one that trains on a device of its own does for this process; sampler, journal,
leases and turns are the real ones, and what they cost is in the figures.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import simulated

from autoprec.atomic import write_text
from autoprec.tune.studies.storage import open_study

RESULT = Path(__file__).parent / "results" / "many_workers.json"


def run(folder: Path, workers: int, trials: int, trial_s: float) -> dict[str, Any]:
    """One study; its rate is taken from the first trial's start to the last one's end, without imports."""
    storage = str(folder / f"{workers}.log")
    settings = [
        simulated.Settings(storage=storage, trials=trials, trial_s=trial_s, seed=seed) for seed in range(workers)
    ]
    processes = [simulated.start(one) for one in settings]
    for process in processes:
        process.join()
    ended = open_study("simulated", storage, folder, {"world": 0}).get_trials()
    complete = [trial for trial in ended if trial.datetime_start and trial.datetime_complete and trial.values]
    started = min(trial.datetime_start for trial in complete)
    seconds = (max(trial.datetime_complete for trial in complete) - started).total_seconds()
    return {
        "workers": workers,
        "trials_per_hour": round(3600 * len(complete) / seconds, 1),
        "seconds": round(seconds, 1),
        **simulated.census(ended),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--trial-s", type=float, default=15.0)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [run(Path(folder), workers, options.trials, options.trial_s) for workers in (1, 4)]
    document = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {"python": platform.python_version(), "optuna": importlib.metadata.version("optuna")},
        "trials": options.trials,
        "trial_s": options.trial_s,
        "ratio": round(runs[1]["trials_per_hour"] / runs[0]["trials_per_hour"], 2),
        "runs": runs,
    }
    write_text(options.output, json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
