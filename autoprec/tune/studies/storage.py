"""Where a study is kept: its storage by URL, its opening, and what it is recognised by.

====================================  =====================================================
None, ``sqlite:///file.db``           one process
``journal:///file.log``, a bare path  several processes on one host or a shared file system
``postgresql://…``, ``mysql://…``     many hosts
====================================  =====================================================
"""

from __future__ import annotations

import importlib.util
import re
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage

from autoprec.errors import MissingExtraError, StudyError, UsageError
from autoprec.tune.studies.journal import open_journal
from autoprec.tune.studies.lock import drop, hold
from autoprec.tune.studies.patience import PATIENCE_S, PatientStorage, is_lasting, storage_failure

_FINGERPRINT = "autoprec:fingerprint"
_SQLITE_FILE, _JOURNAL_FILE = "study.db", "study.log"
_JOURNAL_ENDS = (".log", ".journal")
#: How long another process's write to an SQLite file is waited for.
_BUSY_S = 60.0
#: How long a server is waited for that doesn't answer yet.
_OPENING_S, _OPENING_PAUSE_S = 15.0, 0.5
_ALLOWED = (
    "Allowed: sqlite:///study.db (one process), journal:///study.log or a path that ends in .log (several processes), "
    "postgresql://user@host/name or mysql://user@host/name (several hosts)"
)
#: Scheme → (module, SQLAlchemy's name of it) in order of preference, and what to install where none is there.
_DRIVERS = {
    "postgresql": ((("psycopg", "psycopg"), ("psycopg2", "psycopg2")), "pip install 'autoprec[postgres]'"),
    "mysql": ((("MySQLdb", "mysqldb"), ("pymysql", "pymysql")), "pip install pymysql"),
}

#: Two processes that make the tables at the same time disturb each other; the second try finds them made.
_MAX_CLASHES = 20
_CLASH = re.compile(r"already exists|duplicate key|UNIQUE constraint", re.IGNORECASE)
#: A server that isn't there, perhaps not yet; and one that is.
_ABSENT = re.compile(r"connection refused|no such file|timeout expired", re.IGNORECASE)
_WAKING = re.compile(
    r"starting up|not yet accepting|shutting down|recovery mode|closed the connection|too many|locked", re.IGNORECASE
)


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Our own progress says what Optuna would log."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(verbosity, optuna.logging.WARNING))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)


def storage_url(storage: str | None, folder: Path, workers: int = 1) -> str:
    """The storage's full URL.

    Args:
        storage: a URL, or the path of a journal; None is a file in ``folder``: the one that is there, or else SQLite
            for one worker and a journal for several.
        folder: of the run.
        workers: processes that will use it.

    Raises:
        UsageError: the storage doesn't take so many processes, or isn't one.
    """
    if storage is None:
        is_journal = (folder / _JOURNAL_FILE).exists() or (workers > 1 and not (folder / _SQLITE_FILE).exists())
        storage = f"journal://{folder / _JOURNAL_FILE}" if is_journal else f"sqlite:///{folder / _SQLITE_FILE}"
    elif "://" not in storage:
        if not storage.endswith(_JOURNAL_ENDS):
            raise UsageError(f"the storage {storage!r} is neither a URL nor the path of a journal. {_ALLOWED}")
        storage = f"journal://{Path(storage).expanduser()}"
    if workers > 1 and storage.startswith("sqlite"):
        raise UsageError(
            f"{workers} workers can't share {storage}: SQLite takes one process. Take --workers 1, or another study in "
            "--storage journal:///path/study.log (one host, or a shared file system) or postgresql://user@host/name"
        )
    return storage


def open_storage(storage: str | BaseStorage | None, folder: Path, workers: int = 1) -> BaseStorage:
    """The storage, ready for use.

    Args:
        storage: see :func:`storage_url`; a storage of Optuna's is taken as it is.
        folder: of the run.
        workers: processes that will use it.

    Raises:
        UsageError: the storage doesn't take so many processes, or isn't one.
        MissingExtraError: its driver isn't installed.
        StudyError: it can't be reached or written to.
    """
    if isinstance(storage, BaseStorage):
        return storage
    if storage is None:
        folder.mkdir(parents=True, exist_ok=True)
    url = storage_url(storage, folder, workers)
    started, clashes = time.monotonic(), 0
    while True:
        try:
            with quiet_optuna():
                return _open(url)
        except MissingExtraError:
            raise
        except ImportError as exc:
            raise MissingExtraError(
                f"the storage {without_password(url)} needs a driver that isn't installed: {exc}"
            ) from exc
        except Exception as exc:  # each database driver has its own errors
            is_clash = bool(_CLASH.search(str(exc)))
            clashes += is_clash
            if not (clashes < _MAX_CLASHES if is_clash else time.monotonic() - started < _patience_s(exc)):
                said = str(getattr(exc, "orig", exc))
                raise StudyError(
                    f"the storage {without_password(url)} can't be used: {type(exc).__name__}: {said}. {_ALLOWED}"
                ) from exc
        time.sleep(_OPENING_PAUSE_S)


def _patience_s(exc: Exception) -> float:
    """How long a storage that can't be opened is waited for."""
    failure = storage_failure(exc)
    if failure is None or is_lasting(failure):
        return 0.0
    if _WAKING.search(str(failure)):
        return PATIENCE_S
    return _OPENING_S if _ABSENT.search(str(failure)) else 0.0


def _open(url: str) -> PatientStorage:
    name = without_password(url)
    scheme, _, rest = url.partition("://")
    if scheme == "journal":
        return PatientStorage(open_journal(Path(rest).expanduser()), name)
    options: dict[str, Any] = {"pool_pre_ping": True}
    if scheme.startswith("sqlite"):
        options["connect_args"] = {"timeout": _BUSY_S}
    # Optuna's heartbeat stays off: it beats under study.optimize only, ends with the first error of the database, and
    # never looks at a trial whose process died before the first beat.  Leases do for every storage.
    database = optuna.storages.RDBStorage(_with_driver(scheme, rest), engine_kwargs=options)
    storage = PatientStorage(optuna.storages.get_storage(database), name)
    weakref.finalize(storage, database.engine.dispose)  # closes its connections
    return storage


def _with_driver(scheme: str, rest: str) -> str:
    scheme = "postgresql" if scheme == "postgres" else scheme
    if scheme not in _DRIVERS:
        return f"{scheme}://{rest}"
    drivers, remedy = _DRIVERS[scheme]
    for module, name in drivers:
        if importlib.util.find_spec(module) is not None:
            return f"{scheme}+{name}://{rest}"
    modules = " or ".join(module for module, _ in drivers)
    raise MissingExtraError(f"a storage {scheme}://… needs {modules}, which isn't installed: {remedy}")


def open_study(name: str, storage: str | BaseStorage | None, folder: Path, identity: Mapping[str, Any]) -> optuna.Study:
    """The study of that name, made if it isn't there.

    Args:
        name: of the study.
        storage: opened, or what :func:`open_storage` takes.
        folder: of the run.
        identity: what the study must have been made for.

    Raises:
        UsageError, MissingExtraError, StudyError: the storage can't be used, or the study was made for something else.
    """
    opened = open_storage(storage, folder)
    with quiet_optuna():
        study = optuna.create_study(storage=opened, study_name=name, direction="maximize", load_if_exists=True)
    known = study.user_attrs.get(_FINGERPRINT)
    if known is None:
        study.set_user_attr(_FINGERPRINT, dict(identity))
        # another process may have made it for something else in the same moment
        known = study.user_attrs[_FINGERPRINT]
    check_identity(name, known, identity)
    return study


def known_identity(storage: BaseStorage, name: str) -> dict[str, Any] | None:
    """What a study was made for; None if it isn't there yet."""
    try:
        attrs = storage.get_study_user_attrs(storage.get_study_id_from_name(name))
    except KeyError:
        return None
    return attrs.get(_FINGERPRINT)


def check_identity(name: str, known: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Refuse a study that was made for something else.

    Raises:
        StudyError: with what differs.
    """
    differing = [key for key in identity if known.get(key) != identity[key]]
    if differing:
        listed = "\n".join(
            f"  {key}: {_short(known.get(key))} there, {_short(identity[key])} here" for key in differing
        )
        raise StudyError(
            f"study {name!r} was made for something else:\n{listed}\n"
            "Its trials can't be compared with new ones; give this one another name (--study NAME, study=)"
        )


@contextmanager
def sole_process(study: optuna.Study) -> Iterator[None]:
    """Keep other processes from running trials of a study in an SQLite file.

    Raises:
        StudyError: another one does.
    """
    name = study._storage.name if isinstance(study._storage, PatientStorage) else ""
    file = name.partition("?")[0].removeprefix("sqlite:///")
    if not name.startswith("sqlite:///") or file in ("", ":memory:"):
        yield
        return
    try:
        held = hold(Path(f"{file}.flock"), wait=False)
    except BlockingIOError:
        raise StudyError(
            f"another process runs trials in {name}, and SQLite takes one. For several: --storage "
            "journal:///path/study.log, or postgresql://user@host/name"
        ) from None
    try:
        yield
    finally:
        drop(held)


def without_password(storage: str | BaseStorage) -> str:
    """A storage's URL as it may be shown."""
    return re.sub(r"://([^:/@]*):[^@]*@", r"://\1:***@", storage) if isinstance(storage, str) else repr(storage)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:157]}…"
