"""A WAN on one machine: a network namespace per DC, joined by a user-space relay that shapes every directed link.

Pure: names, packets, control, derive, shapes_text, verdict, report. A machine without I/O: shaping. Thin shells: tun,
relay, bed, sites, inside, measure, cli.
"""
