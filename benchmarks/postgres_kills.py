"""Many workers on a real PostgreSQL, killed at random, with the server restarted in the middle: is anything lost?

    python benchmarks/postgres_kills.py       # some minutes on two cores; writes benchmarks/results/postgres_kills.json

A trial sleeps and measures a deterministic objective (``simulated.py``); sampler, storage, leases and turns are the
real ones.  First a quiet run, then the same with ``kill -9`` at a worker every few seconds and the server crashed and
started again once.  Every planned evaluation must end exactly once, and the best plan be within 1% of the quiet run's.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import simulated

from autoprec.atomic import write_text
from autoprec.tune.studies.storage import open_study

RESULT = Path(__file__).parent / "results" / "postgres_kills.json"
#: An account that a server may run under where this process is root, which PostgreSQL refuses.
_ACCOUNTS = ("postgres", "nobody")


def find_postgres() -> Path | None:
    """The folder of PostgreSQL's programs."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "pg_ctl").exists()), None)


@dataclass
class Server:
    """A PostgreSQL of our own, in a folder of its own, on a socket in that folder."""

    programs: Path
    folder: Path
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.folder / "log"

    @property
    def url(self) -> str:
        return f"postgresql://tester@/postgres?host={self.folder}"

    def make(self) -> None:
        self._run("initdb", "--username=tester", "--auth=trust", "--encoding=UTF8")

    def start(self) -> None:
        options = f"-c listen_addresses='' -c unix_socket_directories='{self.folder}'"
        self._run("pg_ctl", "start", "--wait", f"--log={self.log}", f"--options={options}")

    def stop(self, how: str) -> None:
        """``fast`` ends all sessions; ``immediate`` is a crash."""
        self._run("pg_ctl", "stop", "--wait", f"--mode={how}")

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self.programs / program), f"--pgdata={self.folder / 'data'}", *arguments]
        if os.geteuid() == 0:
            command = ["runuser", "-u", self.folder.owner(), "--", *command]
        # to a file, since the server keeps the pipe of whoever started it
        with (self.folder / f"{program}.out").open("w") as out:
            done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, cwd=self.folder, check=False)
        if done.returncode:
            raise RuntimeError(f"{program} failed: {(self.folder / f'{program}.out').read_text()}")


@contextmanager
def postgres() -> Iterator[Server]:
    """A server, started, and taken away afterwards."""
    programs = find_postgres()
    if programs is None:
        raise RuntimeError("PostgreSQL isn't installed: apt-get install postgresql")
    # a socket's path must be short, and the server's account must reach it
    folder = Path(tempfile.mkdtemp(prefix="autoprec-pg-", dir="/tmp"))
    try:
        if os.geteuid() == 0:
            account = next(name for name in _ACCOUNTS if _has_account(name))
            shutil.chown(folder, account)
        server = Server(programs, folder)
        server.make()
        server.start()
        try:
            yield server
        finally:
            server.stop("immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _has_account(name: str) -> bool:
    import pwd

    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def run(
    server: Server | None,
    settings: simulated.Settings,
    *,
    workers: int,
    kill_every_s: float | None = None,
    max_kills: int = 10_000,
    restart_at: int | None = None,
) -> dict[str, Any]:
    """One study with so many workers; what became of it.

    Args:
        server: started; None where the storage has none.
        settings: of the workers; each gets a seed of its own.
        workers: processes.
        kill_every_s: mean seconds between two kills; None for none.
        max_kills: no more than these.
        restart_at: trials after which the server crashes and starts again; None for never.
    """
    rng = random.Random(settings.seed)
    seeds = iter(range(settings.seed, settings.seed + 10_000))
    started = time.monotonic()

    def begin() -> Any:
        return simulated.start(simulated.Settings(**{**vars(settings), "seed": next(seeds)}))

    processes = [begin() for _ in range(workers)]
    killed, replaced, restarts = 0, 0, 0
    next_kill = float("inf") if kill_every_s is None else time.monotonic() + rng.expovariate(1 / kill_every_s)
    study = open_study("simulated", settings.storage, Path(), {"world": 0})
    while any(process.is_alive() for process in processes) or any(process.exitcode for process in processes):
        time.sleep(0.2)
        ended = simulated.num_ended(study)
        if server is not None and restart_at is not None and not restarts and ended >= restart_at:
            server.stop("immediate")
            time.sleep(3)
            server.start()
            restarts += 1
        if time.monotonic() >= next_kill and ended < settings.trials and killed < max_kills:
            victim = rng.choice([process for process in processes if process.is_alive()])
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()
            killed += 1
            next_kill = time.monotonic() + rng.expovariate(1 / kill_every_s)
        for place, process in enumerate(processes):
            if not process.is_alive() and process.exitcode:
                replaced += 1
                processes[place] = begin()
    seconds = time.monotonic() - started
    return {
        "seconds": round(seconds, 1),
        "killed": killed,
        "replaced": replaced,
        "server_restarts": restarts,
        **simulated.census(study.get_trials()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--trial-s", type=float, default=2.0)
    parser.add_argument("--kill-every-s", type=float, default=3.0)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    runs = {}
    for name, kill_every_s, restart_at in (
        ("quiet", None, None),
        ("killed", options.kill_every_s, options.trials // 2),
    ):
        with postgres() as server:
            settings = simulated.Settings(storage=server.url, trials=options.trials, trial_s=options.trial_s)
            runs[name] = run(
                server, settings, workers=options.workers, kill_every_s=kill_every_s, restart_at=restart_at
            )
            print(name, json.dumps(runs[name]), flush=True)
            version = (server.folder / "data" / "PG_VERSION").read_text().strip()
    document = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {
            "python": platform.python_version(),
            "optuna": importlib.metadata.version("optuna"),
            "sqlalchemy": importlib.metadata.version("sqlalchemy"),
            "postgresql": version,
        },
        "workers": options.workers,
        "trials": options.trials,
        "trial_s": options.trial_s,
        "kill_every_s": options.kill_every_s,
        "value_against_quiet": runs["killed"]["best"] / runs["quiet"]["best"],
        "runs": runs,
    }
    write_text(options.output, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
