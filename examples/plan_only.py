"""Ask the planner, without MPI and without torch: when is it better to move experts than tokens?

    python -m examples.plan_only

Qwen3-30B-A3B's MoE layers on two datacenters of two workers, joined by 100 Mbit/s, with 1-bit codecs.
"""

from __future__ import annotations

from dataclasses import replace

from hybridep_rt.planner.auto import decide, make_plan
from hybridep_rt.planner.economics import LayerShape, Workload
from hybridep_rt.planner.plan_file import dump
from hybridep_rt.planner.plan_spec import parse_plan_spec
from topology.presets import preset
from topology.units import format_size, format_time


def main() -> None:
    """Print the decision for a growing batch, then the plan file of the largest."""
    topology = preset("two-dc")
    layer = LayerShape(hidden=2048, ffn=768, num_experts=128, top_k=8, parameters_per_expert=3 * 2048 * 768)
    work = Workload((layer,) * 48, tokens_per_worker_per_step=0, weight_bytes=0.16, gradient_bytes=0.19)
    for tokens in (512, 4096, 32768):
        work = replace(work, tokens_per_worker_per_step=tokens)
        decision = decide(topology, work)
        uplink = format_size(decision.choice.cost.uplink_bytes(0))
        plain, chosen = decision.candidates[0].cost, decision.choice.cost
        print(
            f"{tokens:>7} tokens per worker: {decision.choice.name:10} {format_time(chosen.total_s):>8} per step, "
            f"plain EP {format_time(plain.total_s):>8}, {uplink} per uplink"
        )
    plan = make_plan(parse_plan_spec("auto"), topology, work)
    print(f"\n{plan.reason}\n\nAs a file, to be edited by hand:\n{dump(plan)}")


if __name__ == "__main__":
    main()
