"""Reading compiled programs and counting their costs. The programs here are written by hand."""

import pytest

from flash_tf.compiling import compiled_hlo, tpu_costs
from flash_tf.compiling.compiled_hlo import Loops
from flash_tf.compiling.tpu_costs import LoopCosts


def estimate(cycles):
    return f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'


ASYNC = f"""HloModule moved, is_scheduled=true

%inside (p: f32[64,64]) -> f32[64,64] {{
  %p = f32[64,64]{{1,0:T(8,128)}} parameter(0)
  ROOT %negate = f32[64,64]{{1,0:T(8,128)}} negate(%p), {estimate(300)}
}}

ENTRY %main (x: f32[64,64]) -> f32[64,64] {{
  %x = f32[64,64]{{1,0:T(8,128)}} parameter(0)
  %start = ((f32[64,64]{{1,0}}), f32[64,64]{{1,0}}, u32[]) async-start(%x), calls=%inside
  %exp.1 = f32[64,64]{{1,0:T(8,128)}} exponential(%x), {estimate(50)}
  %done = f32[64,64]{{1,0:T(8,128)}} async-done(%start), calls=%inside, {estimate(300)}
  %copy-start = (f32[64,64]{{1,0:S(1)}}, f32[64,64]{{1,0}}, u32[]{{:S(2)}}) copy-start(%done), {estimate(7)}
  %copy-done = f32[64,64]{{1,0:S(1)}} copy-done(%copy-start), {estimate(7)}
  ROOT %add.2 = f32[64,64]{{1,0:T(8,128)}} add(%exp.1, %copy-done), {estimate(20)}
}}
"""

BRANCHES = f"""HloModule either

%short (a: s32[]) -> s32[] {{
  ROOT %a = s32[] parameter(0)
}}

%long (b: s32[]) -> s32[] {{
  %b = s32[] parameter(0)
  ROOT %add.1 = s32[] add(%b, %b), {estimate(40)}
}}

ENTRY %main (c: pred[], d: s32[]) -> s32[] {{
  %c = pred[] parameter(0)
  %d = s32[] parameter(1)
  ROOT %either = s32[] conditional(%c, %d, %d), branch_computations={{%short, %long}}
}}
"""

PLACES = """HloModule places

%slices (p: f32[1000,128], q: s32[]) -> f32[1,128] {
  %p = f32[1000,128]{1,0} parameter(0)
  %q = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,128]{1,0} dynamic-slice(%p, %q, %zero), dynamic_slice_sizes={1,128}
}

%updates (p: f32[1000,128], u: f32[1,128], q: s32[]) -> f32[1000,128] {
  %p.1 = f32[1000,128]{1,0} parameter(0)
  %u = f32[1,128]{1,0} parameter(1)
  %q.1 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %update = f32[1000,128]{1,0} dynamic-update-slice(%p.1, %u, %q.1, %zero.1)
}

ENTRY %main (x: f32[1000,128], i: s32[]) -> f32[1000,128] {
  %x = f32[1000,128]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %one = f32[1,128]{1,0} fusion(%x, %i), kind=kLoop, calls=%slices
  %near = f32[1,128]{1,0:S(1)} negate(%one)
  ROOT %changed = f32[1000,128]{1,0} fusion(%x, %near, %i), kind=kLoop, calls=%updates
}
"""

SORTED = """HloModule sorted

%less (a: f32[], b: f32[], c: s32[], d: s32[]) -> pred[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  %c = s32[] parameter(2)
  %d = s32[] parameter(3)
  ROOT %less.1 = pred[] compare(%a, %b), direction=LT
}

ENTRY %main (x: f32[1000], y: s32[1000]) -> (f32[1000], s32[1000]) {
  %x = f32[1000]{0} parameter(0)
  %y = s32[1000]{0} parameter(1)
  ROOT %both = (f32[1000]{0}, s32[1000]{0}) sort(%x, %y), dimensions={0}, to_apply=%less
}
"""

# A product of a batch of 16 in XLA's form for a TPU, and a product that contracts the batch too.
BATCHED = """HloModule batched

ENTRY %main (a: bf16[16,256,128], b: bf16[16,128,200]) -> bf16[16,256,200] {
  %a = bf16[16,256,128]{2,1,0} parameter(0)
  %b = bf16[16,128,200]{2,1,0} parameter(1)
  %all = bf16[128,200,1]{1,0,2} convolution(%c, %b), window={size=16}, dim_labels=0bf_0io->bf0
  %c = bf16[16,128,128]{2,1,0} parameter(2)
  ROOT %each = bf16[16,256,200]{2,1,0} convolution(%a, %b), window={size=16 stride=15 lhs_dilate=16}, dim_labels=0bf_0io->0bf
}
"""  # noqa: E501


def read(text):
    module = compiled_hlo.parse(text)
    loops = Loops(module)
    return module, loops, list(compiled_hlo.walk(module, loops.trips))


def test_a_pair_of_start_and_done_is_counted_once():
    module, _, steps = read(ASYNC)
    assert compiled_hlo.cycles(steps) == 300 + 50 + 7 + 20
    assert tpu_costs.hbm_traffic(module, steps) == 64 * 64 * 4 * (2 + 2 + 1 + 2)


def test_the_longer_branch_stands_for_a_conditional():
    _, _, steps = read(BRANCHES)
    assert compiled_hlo.cycles(steps) == 40


def test_of_an_array_that_is_sliced_or_updated_in_place_only_that_part_moves():
    module, _, steps = read(PLACES)
    index, row = 4, 128 * 4
    assert tpu_costs.hbm_traffic(module, steps) == (row + index + row) + row + (index + row)


def test_every_result_of_an_instruction_moves():
    module, _, steps = read(SORTED)
    assert tpu_costs.hbm_traffic(module, steps) == 4 * 1000 * 4


def test_products_of_a_batch_are_counted_one_by_one():
    module, _, steps = read(BATCHED)
    found = {s.instruction.name: tpu_costs._products(module, s.computation, s.instruction) for s in steps}
    assert found["each"] == [tpu_costs.Product(count=16, rows=256, inner=128, columns=200)]
    assert found["all"] == [tpu_costs.Product(count=16, rows=128, inner=128, columns=200)]
    assert tpu_costs.padding_waste(module, steps, 128) == 0  # the 200 columns stream, a multiple of 8
    useful, padded = (256 * 128 * 200 + 128 * 128 * 200), (256 * 256 * 200 + 128 * 256 * 256)
    assert tpu_costs.padding_waste(module, steps, 256) == pytest.approx(1 - useful / padded)


def loop(condition, step, start=0, bound=8, more=""):
    return f"""HloModule looped

%test (t: (s32[], s32[], f32[4])) -> pred[] {{
  %t = (s32[], s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %n = s32[] get-tuple-element(%t), index=1
  ROOT %less = pred[] compare(%i, %n), direction={condition}
}}

%body (t: (s32[], s32[], f32[4])) -> (s32[], s32[], f32[4]) {{
  %t.1 = (s32[], s32[], f32[4]) parameter(0)
  %i.1 = s32[] get-tuple-element(%t.1), index=0
  %n.1 = s32[] get-tuple-element(%t.1), index=1
  %x = f32[4] get-tuple-element(%t.1), index=2
  %by = s32[] constant({step})
  %next = s32[] add(%i.1, %by)
  %y = f32[4] negate(%x), {estimate(10)}
  ROOT %all = (s32[], s32[], f32[4]) tuple(%next, %n.1, %y)
}}

ENTRY %main (x: f32[4], limit: s32[]) -> f32[4] {{
  %first = s32[] constant({start})
  %last = s32[] constant({bound})
  %limit = s32[] parameter(1)
  %z = f32[4] parameter(0)
  %state = (s32[], s32[], f32[4]) tuple(%first, {"%limit" if bound is None else "%last"}, %z)
  %loop = (s32[], s32[], f32[4]) while(%state), condition=%test, body=%body{more}
  ROOT %out = f32[4] get-tuple-element(%loop), index=2
}}
"""


@pytest.mark.parametrize(
    ("arguments", "passes"),
    [
        ({"condition": "LT", "step": 1}, 8),
        ({"condition": "LT", "step": 3}, 3),
        ({"condition": "GE", "step": -2, "start": 9, "bound": 2}, 4),
        ({"condition": "NE", "step": 2}, 4),
        ({"condition": "LT", "step": 1, "start": 8}, 0),
        ({"condition": "LT", "step": 1, "more": ', backend_config={"known_trip_count":{"n":"5"}}'}, 5),
    ],
)
def test_a_loop_runs_as_often_as_its_counter_says_unless_xla_says_it(arguments, passes):
    _, loops, steps = read(loop(**arguments))
    assert loops.found == {"loop": passes}
    assert compiled_hlo.cycles(steps) == 10 * passes


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"condition": "LT", "step": 1, "bound": None}, "argument 1 of the program"),
        ({"condition": "LT", "step": 0}, "its counters stand still"),
    ],
)
def test_a_loop_whose_passes_are_not_known_is_named(arguments, reason):
    with pytest.raises(ValueError, match=f"^how often the loop loop runs is not known.*{reason}"):
        read(loop(**arguments))


def test_a_loop_that_never_runs_costs_nothing():
    module, loops, steps = read(loop(condition="LT", step=1, start=8))
    once = {"flops": 104.0, "bytes accessed": 1000.0}
    assert compiled_hlo.cycles(steps) == 0
    assert LoopCosts(loop(condition="LT", step=1, start=8), module, loops).total(once)["flops"] < once["flops"]


def test_operations_that_differ_by_their_layer_alone_are_one_row():
    text = ASYNC.replace("add(%exp.1, %copy-done)", "exponential(%copy-done)")
    for number in (50, 20):
        made_by = f'metadata={{op_name="gradient_tape/lm_1/mixer_{number}_1/mul_{number}/Mul"}}, '
        text = text.replace(estimate(number), made_by + estimate(number))
    first, second, *_ = compiled_hlo.costliest(read(text)[2])
    assert (first["name"], first["count"], first["operation"]) == ("negate", 1, "")
    assert (second["kind"], second["count"], second["cycles"]) == ("exponential", 2, 70)
    assert second["operation"] == "gradient of lm/mixer/mul/Mul" and second["share"] == pytest.approx(70 / 377)


def names_without_estimate(text):
    return [step.instruction.name for step in compiled_hlo.without_estimate(read(text)[2])]


def test_large_operations_without_an_estimate_are_found_and_transfers_are_not():
    large = ASYNC.replace("64,64", "512,512")
    assert names_without_estimate(large) == []
    for opcode, number in (("exponential(%x)", 50), ("negate(%p)", 300), ("add(%exp.1, %copy-done)", 20)):
        large = large.replace(f"{opcode}, {estimate(number)}", opcode)
    assert names_without_estimate(large) == ["exp.1", "add.2"]  # the negation runs beside the rest
    assert names_without_estimate(large.replace("512,512", "64,64")) == []


def test_the_largest_integer_is_no_estimate():
    text = ASYNC.replace("64,64", "512,512").replace(estimate(50), estimate(2**63 - 1))
    assert names_without_estimate(text) == ["exp.1"]
    assert compiled_hlo.cycles(read(text)[2]) == compiled_hlo.cycles(read(ASYNC)[2]) - 50


def test_text_that_is_no_program_is_an_error():
    with pytest.raises(ValueError, match="no entry computation"):
        compiled_hlo.parse("nothing here")
