"""The benchmark that says where a traced step's time goes, on a trace written by hand."""

import gzip

import pytest
from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.compiler.xla.service import hlo_pb2

from benchmarks import breakdown, result_files
from tests.profiling.spaces import Writer

BF16, F32 = xla_data_pb2.BF16, xla_data_pb2.F32


def program():
    """Two layers' products, each of an argument, and a norm."""
    proto = hlo_pb2.HloProto()
    proto.hlo_module.name = "step"
    computation = proto.hlo_module.computations.add(id=1)

    def add(number, name, opcode, scope, dtype, dimensions, operands=()):
        one = computation.instructions.add(id=number, name=name, opcode=opcode, operand_ids=operands)
        one.metadata.op_name = scope
        one.shape.element_type = dtype
        one.shape.dimensions.extend(dimensions)

    add(1, "x", "parameter", "", BF16, [1000, 100])
    add(2, "dot.1", "custom-call", "mixer_0_1/mixer_1/MatMul", BF16, [1000, 100], [1])
    add(3, "dot.2", "custom-call", "mixer_7_1/mixer_1/MatMul", BF16, [1000, 100], [1])
    add(4, "sum", "fusion", "norm_1/Sum", F32, [1000], [3])
    return proto.SerializeToString()


def trace(path, plane="/device:GPU:0"):
    writer = Writer()
    programs = writer.plane("/host:metadata")
    programs.event_metadata[1].name = "step(1)"
    stat = programs.event_metadata[1].stats.add(metadata_id=1)
    stat.bytes_value = program()
    events, at = [], 0
    for _ in range(3):  # steps
        for name, duration in (("dot.1", 20), ("dot.2", 60), ("sum", 4), ("copy", 9)):
            events.append((f"kernel of {name}", at, duration, {"hlo_op": name, "hlo_module": "step"}))
            events.append((f"another {name}", at, duration, {"hlo_op": name, "hlo_module": "of values"}))
            at += duration
    writer.line(writer.plane(plane), "Stream #1(Compute)", events)
    data = writer.space.SerializeToString()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


@pytest.mark.parametrize("name", ["flash.xplane.pb", "flash.xplane.pb.gz"])
def test_layers_are_summed_and_short_kernels_are_others(name, tmp_path, capsys):
    result = tmp_path / "result.jsonl"
    arguments = [trace(tmp_path / name), "--least", "0.01", "--device", "a GPU", "--results", str(result)]
    assert breakdown.main(arguments) == 0
    product, others = result_files.read(result)
    assert product["device"] == "a GPU"
    wanted = {
        "trace": "flash",
        "operation": "mixer/MatMul",
        "kind": "custom-call",
        "result": "bf16[1000,100]",
        "launches": 2,
    }
    assert wanted.items() <= product.items()
    assert product["ms"] == pytest.approx(0.08)
    assert product["tb_per_s"] == pytest.approx(2 * 2 * 200_000 / 80e-6 / 1e12)  # two products, argument and result
    assert (others["operation"], others["launches"], others["ms"]) == ("others", 1, pytest.approx(0.004))
    assert "0.1 ms a step" in capsys.readouterr().out


def test_what_is_no_trace_of_a_gpu_is_refused(tmp_path):
    other = tmp_path / "other.pb"
    other.write_bytes(b"no trace")
    with pytest.raises(ValueError, match="is no trace"):
        breakdown.main([str(other)])
    with pytest.raises(ValueError, match="has no kernel of a program: it needs the trace of a GPU"):
        breakdown.main([trace(tmp_path / "cpu.pb", plane="/host:CPU")])
