"""A WAN on one machine: a network namespace per DC, joined by a user-space relay that shapes every directed link.

Pure: names, packets, control, derive, shapes_text, verdict, report, ssh_text. A machine without I/O: shaping. Thin
shells: tun, relay, priority, rights, bed, sites, ssh, inside, measure, cli.
"""
