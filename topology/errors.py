"""The root of the project's error tree, kept here because nothing lies below `topology`.

HybridEPError
└── ConfigError (also ValueError): a setting, file or argument is wrong; the text says where and what is allowed
    └── TopologyError
"""

from __future__ import annotations


class HybridEPError(Exception):
    """Every error this project raises on purpose."""


class ConfigError(HybridEPError, ValueError):
    """A setting, file or argument is wrong. Programs end with exit code 2."""


class TopologyError(ConfigError):
    """A topology file or a question asked of a topology is wrong."""


def shown(text: str) -> str:
    """Text from the file for an error message: quoted, on one line, not too long."""
    return repr(text if len(text) <= 60 else text[:57] + "...")
