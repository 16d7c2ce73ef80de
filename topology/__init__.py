"""Where things are: datacenters, nodes, GPUs and the links between them. Pure data and pure functions."""
