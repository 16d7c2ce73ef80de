"""Plan files and plan specs: what is written reads back, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridep_rt.errors import PlanError
from hybridep_rt.planner.makers import domains, plain_ep, replicate_all, subscribe
from hybridep_rt.planner.plan import LayerPlan, Layout, Plan
from hybridep_rt.planner.plan_file import dump, from_file, parse_plan, to_file
from hybridep_rt.planner.plan_spec import Maker, PlanSpec, make_layer, parse_plan_spec

EVEN = Layout((2, 2))
HEAD = "workers_per_dc: [2, 2]\nlayers:\n"


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    layout = Layout(tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))))
    worker = st.integers(0, layout.workers - 1)

    def by_hand() -> LayerPlan:
        home = draw(st.lists(worker, min_size=1, max_size=5))
        return subscribe(layout, home, [sorted({owner} | draw(st.sets(worker))) for owner in home])

    made = [plain_ep(layout, 5), replicate_all(layout, 3), domains(layout, 4, (layout.dcs,)), by_hand()]
    layers = draw(st.lists(st.sampled_from(made), min_size=1, max_size=6))
    text = st.text(max_size=20).map(lambda reason: "".join(c for c in reason if c.isprintable()).strip())
    return Plan(epoch=draw(st.integers(0, 99)), layout=layout, layers=tuple(layers), reason=draw(text))


@given(plans(), st.booleans())
def test_a_plan_reads_back_as_it_was_written(plan: Plan, as_json: bool) -> None:
    assert parse_plan(dump(plan, as_json=as_json), "f") == plan


def test_routes_that_cannot_be_derived_are_written_out() -> None:
    layout = Layout((2, 2))
    layer = domains(layout, 4, (2, 2), (2, 2))
    odd = LayerPlan(layer.home, layer.holders, layer.route, layer.serve[:1] + layer.serve[:1] + layer.serve[2:])
    plan = Plan(0, layout, (odd,), "by hand")
    assert "serve" in dump(plan)
    assert parse_plan(dump(plan), "f", layout) == plan


def test_files_are_short_where_a_maker_made_the_plan(tmp_path: Path) -> None:
    plan = Plan(3, EVEN, (plain_ep(EVEN, 8),) * 30, "why")
    for name in ("plan.yaml", "plan.json"):
        to_file(plan, tmp_path / name)
        assert (tmp_path / name).stat().st_size < 200
        assert from_file(tmp_path / name, EVEN) == plan


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEAD + "- {plan: nonsense, experts: 8}", r"f:3: layers\[0\]: plan 'nonsense' is not known; allowed: auto, ep"),
        (HEAD + "- {plan: auto, experts: 8}", "allowed here: ep, replicate"),
        (HEAD + "- {plan: ep}", "the key 'experts' is missing"),
        (HEAD + "- {plan: ep, experts: 0}", r"f:3: layers\[0\].experts: found '0', allowed: a whole number from 1"),
        (HEAD + "- {plan: ep, experts: 99999999}", "allowed: a whole number from 1"),
        (HEAD + "- {plan: ep, experts: 8, home: [0]}", "unknown key 'home'"),
        (HEAD + "- {plan: 'domains:3', experts: 8}", "domain size 3 is not possible at level 0, allowed: 1, 2"),
        (HEAD + "- {plan: ep, experts: 8, repeat: 4096}\n- {plan: ep, experts: 8}", "f:4: .*allowed: 4096"),
        (HEAD + "- {home: [0, 9]}", r"f:3: layers\[0\].home\[1\]: found '9', allowed: a whole number from 0 to 3"),
        (HEAD + "- {home: [0], holders: [[1]]}", "must be among its holders"),
        (HEAD + "- {home: [0], holders: [[0], [1]]}", "found 2 lists, allowed: 1"),
        (HEAD + "- {home: [0], route: [[1], [1]]}", "where nobody holds it"),
        (HEAD + "- {home: [0], route: [[0, 0], [0]]}", "found 2 numbers, allowed: 1"),
        (HEAD + "- {home: [0], serve: [[0], [0], [2], [-1]]}", "serve must be -1"),
        (HEAD + "- {home: [0], nonsense: 1}", "f:3: .*unknown key 'nonsense'"),
        (HEAD + "- 5", "found '5', allowed: a mapping"),
        ("workers_per_dc: [2, 2]", "the key 'layers' is missing"),
        ("workers_per_dc: [2, 3]\nlayers: [{plan: ep, experts: 1}]", r"f:1: .*the topology's \(2, 2\)"),
        ("a: &x [1]\nb: *x", "anchors and aliases are not allowed"),
        ("[" * 5000, "nested deeper"),
        ("a: [", "not valid YAML"),
    ],
)
def test_wrong_files_are_refused_with_the_place(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        parse_plan(text, "f", EVEN)


def test_files_that_cannot_be_used_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    (tmp_path / "big.yaml").write_bytes(b"#" * (1 << 21))
    for name, says in [("empty", "empty"), ("binary", "not UTF-8"), ("big", "larger than 1 MiB"), ("no", "read")]:
        with pytest.raises(PlanError, match=rf"{name}\.yaml: .*{says}"):
            from_file(tmp_path / f"{name}.yaml")
    with pytest.raises(PlanError, match=r"found suffix '\.txt', allowed: \.yaml"):
        to_file(Plan(0, EVEN, (plain_ep(EVEN, 1),), ""), tmp_path / "plan.txt")


@given(st.text(max_size=200))
def test_garbage_is_a_plan_error(text: str) -> None:
    with pytest.raises(PlanError):
        parse_plan(text, "f")


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("auto", PlanSpec(Maker.AUTO)),
        ("ep", PlanSpec(Maker.EP)),
        ("replicate", PlanSpec(Maker.REPLICATE)),
        ("domains:2", PlanSpec(Maker.DOMAINS, sizes=(2,))),
        ("domains:2,1", PlanSpec(Maker.DOMAINS, sizes=(2, 1))),
        ("here/plan.json", PlanSpec(Maker.FILE, path="here/plan.json")),
    ],
)
def test_plan_specs(text: str, spec: PlanSpec) -> None:
    assert parse_plan_spec(text) == spec
    assert str(spec) == text


@pytest.mark.parametrize("text", ["", "EP", "file", "domains", "domains:", "domains:2,", "domains:-1"])
def test_other_specs_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"allowed: auto, ep, replicate, domains:S0|allowed: whole numbers"):
        parse_plan_spec(text)


def test_specs_make_layers() -> None:
    assert make_layer(parse_plan_spec("ep"), EVEN, 4) == plain_ep(EVEN, 4)
    assert make_layer(parse_plan_spec("replicate"), EVEN, 4) == replicate_all(EVEN, 4)
    assert make_layer(parse_plan_spec("domains:2,2"), EVEN, 4, (2, 2)) == replicate_all(EVEN, 4)
