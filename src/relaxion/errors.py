"""Everything that can go wrong, as a tree.

RelaxionError                 whatever Relaxion itself reports; catch this one to catch all
├── InputError                the user gave something that cannot be used
│   ├── StructureError        a structure is empty, not finite, flat, overlapping, ...
│   ├── SettingsError         a setting is unknown, out of range or contradicts another
│   └── FileError             a file is missing, unreadable, empty, or would be overwritten
├── PotentialError            the physics engine cannot answer
│   ├── UnknownPotentialError no potential of that name
│   ├── MissingElementError   the potential has no parameters for an element
│   ├── MissingStressError    a free cell was asked for, the potential gives no stress
│   └── MissingExtraError     an optional package is not installed
├── RestartError              a restart file is foreign, damaged or of another version
├── CheckpointError           a checkpoint or a file of weights is foreign, damaged or of another version
├── PolicyError               a policy bundle is unknown, foreign, damaged or of a newer format
└── RunError                  training cannot go on: run folder taken, settings changed, numbers not finite

Each message says what came, what was expected and what to try next, in one sentence or two. The end of a
relaxation is never an error: outcomes are data (`relaxion.Outcome`). What works, but not as the user may believe, is a
`RelaxionWarning`.
"""


class RelaxionError(Exception):
    """Base of every error raised by Relaxion on purpose."""


class InputError(RelaxionError, ValueError):
    """The user gave something that cannot be used."""


class StructureError(InputError):
    """A structure is empty, not finite, flat, overlapping or not convertible."""


class SettingsError(InputError):
    """A setting is unknown, out of range or contradicts another."""


class FileError(InputError):
    """A file is missing, unreadable, empty, or would be overwritten."""


class PotentialError(RelaxionError):
    """The physics engine cannot answer."""


class UnknownPotentialError(PotentialError, ValueError):
    """No potential of that name."""


class MissingElementError(PotentialError):
    """The potential has no parameters for an element."""


class MissingStressError(PotentialError):
    """A free cell was asked for, but the potential gives no stress."""


class MissingExtraError(PotentialError, ImportError):
    """An optional package is not installed."""


class RestartError(RelaxionError):
    """A restart file is foreign, damaged or written by another version."""


class CheckpointError(RelaxionError):
    """A checkpoint or a file of weights is foreign, damaged or written by another version."""


class PolicyError(RelaxionError):
    """A policy bundle is unknown, foreign, damaged, of a newer format, or does not fit what is installed."""


class RunError(RelaxionError):
    """Training cannot begin or go on: the run folder is taken, settings changed, numbers are not finite."""


class RelaxionWarning(UserWarning):
    """Something goes on, but perhaps not as the user believes."""


class AssessmentStopped(Exception):
    """No error: somebody asked an assessment to stop before it was done."""
