"""Every error autoprec raises on purpose.

Each message says what was wrong, which value, what is allowed and what to do next::

    AutoprecError
    ├── UsageError              an argument of the API or the command line can't be used
    │   ├── TaskError           a task can't be imported, or isn't a Task
    │   └── MissingExtraError   an optional package isn't installed
    ├── RuleError               a rule file is wrong: unknown op, a clash, a rule that matches nothing
    ├── TargetError             an unknown target, or one that lacks what was asked of it
    ├── PlanError
    │   ├── PlanFileError       the file is corrupt, truncated, too large or of a newer schema
    │   └── PlanMismatchError   the plan was made for another model
    ├── ConversionError         a site didn't get what the plan asked and strict=True
    ├── BackendError            a kernel can't run what it was asked to
    ├── TrainingError           a training loop did something that low precision makes wrong
    │   └── NonFiniteError      the loss or a gradient stays non-finite at every scale
    └── StudyError              a study can't go on: storage, fingerprint, or a budget below the noise
"""


class AutoprecError(Exception):
    """Root of the tree: ``except AutoprecError`` catches all that autoprec raises on purpose."""


class UsageError(AutoprecError, ValueError):
    """An argument can't be used."""


class TaskError(UsageError):
    """A task can't be imported, or isn't a Task."""


class MissingExtraError(UsageError, ImportError):
    """An optional package isn't installed; the message carries the ``pip install`` line."""


class RuleError(AutoprecError):
    """A rule file is wrong."""


class TargetError(AutoprecError):
    """An unknown target, or one that lacks what was asked of it."""


class PlanError(AutoprecError):
    """A plan can't be used."""


class PlanFileError(PlanError):
    """A plan file can't be read."""


class PlanMismatchError(PlanError):
    """A plan was made for another model."""


class ConversionError(AutoprecError):
    """A site didn't get what the plan asked, and ``strict=True``."""


class BackendError(AutoprecError):
    """A kernel can't run what it was asked to."""


class TrainingError(AutoprecError):
    """A training loop did something that low precision makes wrong."""


class NonFiniteError(TrainingError):
    """The loss or a gradient stays non-finite at every scale."""


class StudyError(AutoprecError):
    """A study can't go on."""
