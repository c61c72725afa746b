"""Routing traces: the reader takes nothing on trust, the writer writes what the reader accepts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.trace import TraceWriter, read_trace

TRACES = Path(__file__).parent / "data" / "traces"
HEAD = "# n_layer=2\n# n_expert=8\n# n_expert_used=2\nphase,step,layer,experts\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "t.csv"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return path


@pytest.mark.parametrize("name", ["zipf", "uniform"])
def test_reads_the_committed_traces(name):
    trace = read_trace(TRACES / f"{name}-v4-shape.csv")
    assert (trace.n_layer, trace.n_expert, trace.n_expert_used) == (8, 256, 6)
    assert len(trace) == 640 and trace.ids.shape == (3840,)
    assert (trace.phase == 1).all()
    np.testing.assert_array_equal(trace.token, np.repeat(np.arange(80), 8))
    np.testing.assert_array_equal(trace.layer, np.tile(np.arange(8), 80))
    np.testing.assert_array_equal(trace.start, np.arange(641) * 6)
    dtypes = [x.dtype for x in (trace.layer, trace.token, trace.start, trace.ids)]
    assert dtypes == [np.int32, np.int64, np.int64, np.int32]


def test_headers_remarks_and_layout(tmp_path):
    text = (
        "# a remark: = signs do not make it a header\n#n_layer=3\n# n_expert = 8\n#n_expert=4\n"
        "# note=a=b, c\nprefill,7,2,3\n# a remark between lines\ndecode,7,0,1 0 2\r\n"
    )
    trace = read_trace(write(tmp_path, text))
    assert (trace.n_layer, trace.n_expert, trace.n_expert_used) == (3, 4, None)
    assert trace.header["note"] == "a=b, c"
    assert trace.step.tolist() == [7, 7] and trace.token.tolist() == [0, 1]
    assert trace.start.tolist() == [0, 1, 4] and trace.ids.tolist() == [3, 1, 0, 2]


def test_select(tmp_path):
    text = HEAD + "prefill,0,0,1 2\nprefill,1,0,3 4\ndecode,2,0,5 6\ndecode,2,1,7 0\n"
    trace = read_trace(write(tmp_path, text))
    assert trace.select("all") is trace
    decode = trace.select("decode")
    assert decode.ids.tolist() == [5, 6, 7, 0] and decode.start.tolist() == [0, 2, 4]
    assert decode.token.tolist() == [2, 2] and decode.layer.tolist() == [0, 1]
    assert trace.select("prefill").ids.tolist() == [1, 2, 3, 4]
    assert len(read_trace(write(tmp_path, HEAD + "decode,0,0,1 2\n")).select("prefill")) == 0
    with pytest.raises(UsageError, match="'both'"):
        trace.select("both")


@pytest.mark.parametrize(
    ("text", "line", "expected", "got"),
    [
        ("", 1, "no data lines", ""),
        (HEAD, 4, "no data lines", ""),
        ("# n_layer=2\ndecode,0,0,1\n", 2, "no header line '#n_expert=", ""),
        ("# n_expert=2\ndecode,0,0,1\n", 2, "no header line '#n_layer=", ""),
        ("# n_layer=0\n# n_expert=2\ndecode,0,0,1\n", 3, "n_layer must be at least 1", "0"),
        ("# n_layer=2\n# n_expert=two\ndecode,0,0,1\n", 3, "whole number as n_expert", "'two'"),
        ("# n_layer=99999999999\n# n_expert=2\ndecode,0,0,1\n", 3, "n_layer", "99999999999"),
        ("# n_layer=2\n# n_expert=2\n# n_expert_used=3\ndecode,0,0,1\n", 4, "larger than", "3"),
        ("# n_layer=2\n# n_layer=2\n", 2, "'n_layer=' a second time", ""),
        (HEAD + "decode,0,0,1 2\n# n_layer=2\n", 6, "'n_layer=' after the data", ""),
        (HEAD + "\0" * (3 << 20), 5, "a line of less than 1048576 characters", "got a longer one"),
        (HEAD + "decode,0,0\n", 5, "expected 4 fields", "'decode,0,0'"),
        (HEAD + "decode,0,0,1 2,3\n", 5, "expected 4 fields", "1 2,3"),
        (HEAD + "\n", 5, "expected 4 fields", "''"),
        (HEAD + "decode,0,0,1 2\nphase,step,layer,experts\n", 6, "expected phase", "'phase'"),
        (HEAD + "Decode,0,0,1 2\n", 5, "expected phase", "'Decode'"),
        (HEAD + "decode,-1,0,1 2\n", 5, "whole number as step", "'-1'"),
        (HEAD + "decode,1.0,0,1 2\n", 5, "whole number as step", "'1.0'"),
        (HEAD + "decode,9999999999999999999,0,1 2\n", 5, "whole number as step", "999"),
        (HEAD + "decode,\u0663,0,1 2\n", 5, "whole number as step", "\u0663"),
        (HEAD + "decode,0,2,1 2\n", 5, "layer 2 is out of range: expected 0 to 1", ""),
        (HEAD + "decode,0,0,1 8\n", 5, "expert 8 is out of range: expected 0 to 7", ""),
        (HEAD + "decode,0,0,1 x\n", 5, "whole number as expert", "'x'"),
        (HEAD + "decode,0,0,1 1\n", 5, "expert 1 twice", ""),
        (HEAD + "decode,0,0,1 2 3\n", 5, "expected 2 experts", "got 3"),
        (HEAD + "decode,0,0,\n", 5, "expected 2 experts", "got 0"),
        ("# n_layer=2\n# n_expert=2\ndecode,0,0, \n", 3, "at least one expert", "got 0"),
        (
            HEAD + "decode,0,0,1 2\ndecode,0,1,1 2\ndecode,1,0,1 2\ndecode,0,1,3 4\n",
            8,
            "second line for decode step 0, layer 1",
            "",
        ),
    ],
)
def test_bad_traces_name_file_line_expected_and_got(tmp_path, text, line, expected, got):
    path = write(tmp_path, text)
    with pytest.raises(MosaicError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: ")
    assert expected in message and got in message and "\n" not in message
    assert caught.value.code == "EFORMAT"


def test_missing_folder_and_binary_files(tmp_path):
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(MosaicError, match="cannot read") as caught:
            read_trace(path)
        assert str(path) in str(caught.value)
    path = tmp_path / "bin.csv"
    path.write_bytes(b"# n_layer=2\n\xff\xfe\x00")
    with pytest.raises(MosaicError, match="not UTF-8"):
        read_trace(path)


@given(
    st.integers(1, 5).flatmap(
        lambda used: st.tuples(
            st.just(used),
            st.lists(
                st.tuples(
                    st.booleans(),
                    st.integers(0, 10**18 - 1),
                    st.integers(0, 3),
                    st.lists(st.integers(0, 8), min_size=used, max_size=used, unique=True),
                ),
                min_size=1,
                unique_by=lambda x: x[:3],
            ),
        )
    )
)
@settings(max_examples=50)
def test_write_then_read(tmp_path_factory, case):
    used, lines = case
    path = tmp_path_factory.mktemp("t") / "t.csv"
    with TraceWriter(path, 4, 9, used, {"note": "two\nlines"}) as writer:
        for decode, step, layer, ids in lines:
            writer.add("decode" if decode else "prefill", step, layer, np.array(ids, np.int32))
    trace = read_trace(path)
    assert (trace.n_layer, trace.n_expert, trace.n_expert_used) == (4, 9, used)
    assert trace.header["note"] == "two lines"
    assert trace.phase.tolist() == [int(x[0]) for x in lines]
    assert trace.step.tolist() == [x[1] for x in lines]
    assert trace.layer.tolist() == [x[2] for x in lines]
    assert trace.ids.tolist() == [e for x in lines for e in x[3]]


@pytest.mark.parametrize(
    "line",
    [
        ("decoding", 0, 0, [0, 1]),
        ("decode", -1, 0, [0, 1]),
        ("decode", 0, 2, [0, 1]),
        ("decode", 0, 0, [0]),
        ("decode", 0, 0, [1, 1]),
        ("decode", 0, 0, [0, 4]),
        ("decode", 0, 0, [-1, 0]),
        ("decode", 0, 0, []),
    ],
)
def test_writer_refuses_what_the_reader_would(tmp_path, line):
    with TraceWriter(tmp_path / "t.csv", 2, 4, 2) as writer:
        with pytest.raises(ValueError, match="bad trace line"):
            writer.add(*line)


def test_writer_failures(tmp_path):
    with pytest.raises(ValueError, match="3 of 2 experts"):
        TraceWriter(tmp_path / "t.csv", 1, 2, 3)
    with pytest.raises(MosaicError, match="cannot write the trace"):
        TraceWriter(tmp_path / "no" / "t.csv", 1, 2, 1)
    writer = TraceWriter(tmp_path / "t.csv", 1, 2, 1)
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.add("decode", 0, 0, [0])


def test_full_disk_is_reported():
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    writer = TraceWriter("/dev/full", 1, 2, 1)
    with pytest.raises(MosaicError, match="/dev/full: cannot write the trace: No space left"):
        for step in range(100000):
            writer.add("decode", step, 0, [0])
        writer.close()
