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
