"""The torch face: router, expert computation, dispatch and combine, the MoE layer."""
