"""Where things are: datacenters, nodes, GPUs and the links between them. Pure data and pure functions."""

from topology.errors import TopologyError
from topology.model import Datacenter, Host, Level, Link, LinkTable, Topology
from topology.read import parse
from topology.source import load

__all__ = ["Datacenter", "Host", "Level", "Link", "LinkTable", "Topology", "TopologyError", "load", "parse"]
