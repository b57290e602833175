"""Reading traces. Traces of GPUs and TPUs are protos written by hand."""

import numpy as np
import pytest
from tensorflow.compiler.xla.service import hlo_pb2

from flash_tf.profiling import intervals, latency, operations, trace
from tests.profiling.spaces import Writer

KERNEL = "void gemm_kernel<float, 128, 128>(Params)"


def milliseconds(space, name="train"):
    return [(s.number, *(getattr(s, part) / 1e9 for part in latency.TIMES)) for s in trace.read(space, name).steps]


def gpu(writer, number, streams):
    plane = writer.plane(f"/device:GPU:{number}")
    for stream, events in streams.items():
        writer.line(plane, f"Stream #{stream}(Compute)", events)
    return plane


def test_a_steps_parts_are_device_then_input_then_host_and_add_up_to_the_whole():
    writer = Writer()
    writer.steps((0, 10_000), (10_000, 20_000), waits=[(0, 3_000), (10_000, 4_000)])
    # The device works during some of the first wait, which costs nothing.
    gpu(writer, 0, {7: [(KERNEL, 2_000, 6_000, {}), (KERNEL, 15_000, 10_000, {})]})
    assert milliseconds(writer.space) == [(1, 10, 6, 2, 2), (2, 20, 10, 6, 4)]


def test_each_step_of_a_mark_of_several_has_its_share_of_the_time():
    writer = Writer()
    writer.steps((0, 10_000), (10_000, 20_000), waits=[(0, 3_000), (10_000, 4_000)])
    gpu(writer, 0, {7: [(KERNEL, 2_000, 6_000, {}), (KERNEL, 15_000, 10_000, {})]})
    found = trace.read(writer.space, "train", per_mark=2).steps
    assert [(s.total / 1e9, s.device / 1e9, s.input / 1e9) for s in found] == [(5, 3, 1)] * 2 + [(10, 5, 2)] * 2


def test_streams_and_devices_that_work_at_once_count_once_in_a_step():
    writer = Writer()
    writer.steps((0, 10_000))
    gpu(writer, 0, {7: [(KERNEL, 1_000, 4_000, {})], 8: [("MemcpyD2D", 2_000, 5_000, {})]})
    gpu(writer, 1, {7: [(KERNEL, 1_000, 8_000, {})]})
    assert milliseconds(writer.space) == [(1, 10, 8, 2, 0)]


def test_what_runs_outside_the_steps_counts_in_none():
    writer = Writer()
    writer.steps((10_000, 10_000), waits=[(0, 9_000), (25_000, 1_000)])
    gpu(writer, 0, {7: [(KERNEL, 0, 5_000, {}), (KERNEL, 12_000, 4_000, {}), (KERNEL, 30_000, 9_000, {})]})
    assert milliseconds(writer.space) == [(1, 10, 4, 6, 0)]
    ((count, time),) = trace.read(writer.space, "train").operations.values()
    assert (count, time) == (1, 4e9)


def test_a_kernel_is_called_by_the_models_own_name_where_the_driver_tells_it():
    writer = Writer()
    writer.steps((0, 10_000))
    named = {"tf_op": "while/body/_1/while/mixer_3_1/mixer_1/einsum/Einsum:Einsum"}
    other = {"tf_op": "while/body/_1/while/mixer_4_1/mixer_1/einsum/Einsum:Einsum"}
    gpu(writer, 0, {7: [(KERNEL, 0, 3_000, named), ("other_gemm", 4_000, 1_000, other), ("memset", 6_000, 500, {})]})
    found = trace.read(writer.space, "train")
    assert found.operations == {("mixer/einsum/Einsum", "Einsum"): (2, 4e9), ("memset", "kernel"): (1, 0.5e9)}
    assert found.devices == 1


def test_a_gpus_lines_that_repeat_its_streams_by_module_are_not_counted_again():
    writer = Writer()
    writer.steps((0, 10_000))
    plane = gpu(writer, 0, {7: [(KERNEL, 0, 3_000, {})]})
    writer.line(plane, "XLA Modules", [("jit_step", 0, 9_000, {})])
    writer.line(plane, "XLA Ops", [("fusion.1", 0, 9_000, {"hlo_op": "fusion.1"})])
    assert milliseconds(writer.space) == [(1, 10, 3, 7, 0)]
    assert sum(time for _, time in trace.read(writer.space, "train").operations.values()) == 3e9


def test_a_loop_on_a_tpu_keeps_only_the_time_that_its_operations_leave():
    writer = Writer()
    writer.steps((0, 10_000))
    plane = writer.plane("/device:TPU:0", peak_teraflops_per_second=275.0)
    writer.line(plane, "Steps", [("1", 0, 10_000, {})])
    writer.line(plane, "XLA Modules", [("jit_step", 0, 10_000, {})])
    fusion = {"tf_op": "jit(step)/mixer_0/dot_general", "hlo_category": "convolution fusion"}
    inside = [("%fusion.1 = f32[8]", 1_000, 3_000, fusion), ("%fusion.2 = f32[8]", 4_000, 2_000, fusion)]
    writer.line(plane, "XLA Ops", [("%while.5 = (s32[])", 0, 8_000, {"hlo_category": "while"}), *inside], shift=0)
    found = trace.read(writer.space, "train")
    assert found.operations == {("while", "while"): (1, 3e9), ("mixer/dot_general", "convolution fusion"): (2, 5e9)}
    assert (found.devices, found.peak) == (1, 275e12)
    assert milliseconds(writer.space) == [(1, 10, 8, 2, 0)]


def test_lines_that_begin_at_different_moments_share_one_clock():
    writer = Writer()
    writer.steps((0, 10_000))
    plane = writer.plane("/device:GPU:0")
    writer.line(plane, "Stream #7", [(KERNEL, 6_000, 8_000, {})], shift=5_000)
    assert milliseconds(writer.space) == [(1, 10, 4, 6, 0)]


def hlo(name, op_name):
    proto = hlo_pb2.HloProto()
    proto.hlo_module.name = name
    computation = proto.hlo_module.computations.add()
    instruction = computation.instructions.add(name="dot.7", opcode="dot")
    instruction.metadata.op_name = op_name
    for size, local in ((1000, False), (24, False), (500, True)):
        proto.buffer_assignment.buffer_allocations.add(size=size, is_thread_local=local)
    return proto.SerializeToString()


def test_two_programs_may_have_an_instruction_of_one_name():
    writer = Writer()
    host = writer.steps((0, 10_000))
    metadata = writer.plane("/host:metadata")
    for number, (name, scope) in enumerate({"a": "mixer_1/MatMul", "b": "head/MatMul"}.items()):
        entry = metadata.event_metadata[number]
        entry.id, entry.name = number, f"{name}({number})"
        writer._stats(metadata, entry.stats, {"Hlo Proto": hlo(name, scope)})
    events = [
        ("dot.7", 0, 2_000, {"hlo_op": "dot.7", "hlo_module": "a", "program_id": 0}),
        ("dot.7", 2_000, 1_000, {"hlo_op": "dot.7", "hlo_module": "b", "program_id": 1}),
    ]
    writer.line(host, "tf_XLAEigen", events)
    found = trace.read(writer.space, "train")
    assert found.operations == {("mixer/MatMul", "dot"): (1, 2e9), ("head/MatMul", "dot"): (1, 1e9)}
    assert found.program_bytes == 1024
    assert found.devices == 0


def test_a_cpus_work_is_its_operations_and_not_those_that_prepare_input():
    writer = Writer()
    host = writer.steps((0, 10_000))
    writer.line(host, "tf_Compute/1", [("ExecutorState::Process", 0, 9_000, {}), ("a/Add:AddV2", 1_000, 2_000, {})])
    writer.line(host, "tf_Compute/2", [("b/MatMul:_MklMatMul", 2_000, 3_000, {})])
    writer.line(host, "tf_data_private_threadpool/1", [("PyFunc:PyFunc", 0, 10_000, {})])
    assert milliseconds(writer.space) == [(1, 10, 4, 6, 0)]
    assert set(trace.read(writer.space, "train").operations) == {("a/Add", "AddV2"), ("b/MatMul", "MatMul")}


def test_a_trace_without_steps_or_without_work_is_an_error_that_says_so(tmp_path):
    writer = Writer()
    writer.steps((0, 10_000))
    with pytest.raises(ValueError, match="the trace is empty: nothing ran in its 1 steps 'train'"):
        trace.read(writer.space, "train")
    with pytest.raises(ValueError, match="the trace has no step: it needs events 'decode' with a step_num"):
        trace.read(writer.space, "decode")
    with pytest.raises(ValueError, match="the profiler wrote no trace"):
        trace.load([])
    path = tmp_path / "vm.xplane.pb"
    path.write_bytes(b"\xff not a proto")
    with pytest.raises(ValueError, match="vm.xplane.pb is damaged"):
        trace.load([str(path)])


def test_scopes_lose_the_numbers_of_layers_and_calls_and_nothing_else():
    assert operations.without_numbers("while/body/_1/gradient_tape/while/mixer_0_1/mixer_1/MatMul/MatMul_1") == (
        "gradient_tape/mixer/MatMul"
    )
    assert operations.of_tensorflow("a/conv2d_1/Conv2D:_MklConv2D") == ("a/conv2d/Conv2D", "Conv2D")


def test_the_call_of_a_function_is_no_operation_beside_those_in_it():
    assert operations.OP.fullmatch("a/conv2d_1/Conv2D:_MklConv2D") and operations.OP.fullmatch("while:While")
    assert not operations.OP.fullmatch("__inference_read_2995:__inference_read_2995")


def covered(starts, ends, size=100):
    times = np.zeros(size, bool)
    for start, end in zip(starts, ends, strict=True):
        times[start:end] = True
    return times


def test_merged_spans_cover_the_same_times_in_order_and_apart():
    rng = np.random.default_rng(0)
    for count in (0, 1, 2, 9, 30):
        starts = rng.integers(0, 90, count)
        ends = starts + rng.integers(1, 10, count)
        merged = intervals.merged(starts, ends)
        assert (covered(*merged) == covered(starts, ends)).all()
        assert (merged[0][1:] > merged[1][:-1]).all()
        assert intervals.length(merged, 20, 60) == covered(starts, ends)[20:60].sum()


def test_the_own_time_of_a_span_is_what_the_spans_inside_it_leave():
    starts, ends = [0, 1, 2, 5, 12], [10, 4, 3, 9, 13]
    assert intervals.own(starts, ends).tolist() == [3, 2, 1, 4, 1]
