"""Does one glob take every name that another takes?"""

import fnmatch

#: What a ``*`` may stand for; characters that no module name has, so that only a wildcard matches them.
_STARS = ("", "\x00", "\x00\x01\x02", "\x02.\x00::\x01")


def covers(wide: str, narrow: str) -> bool:
    """Whether ``wide`` surely matches every name that ``narrow`` matches.

    Every ``*`` of the narrow glob is replaced by strange texts and each ``?`` by a strange letter: a glob that matches
    them all matches whatever they stand for.  Globs with ``[…]`` are never said to be covered, unless equal.
    """
    if wide == narrow:
        return True
    if "[" in narrow:
        return False
    return all(fnmatch.fnmatchcase(narrow.replace("*", star).replace("?", "\x03"), wide) for star in _STARS)
