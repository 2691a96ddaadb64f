"""The GPU check runs without a GPU, and says what it must: its own oracles, verdicts and failures."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu_check import (
    __main__ as command,
)
from benchmarks.gpu_check import (
    bitmask,
    calls,
    decode,
    decode_attention,
    masked_sample,
    masks,
    measure,
    names,
    peers,
    report,
)
from benchmarks.gpu_check.rows import CheckFailed, Missing, NoTime, Recorder, Row, read_rows
from benchmarks.gpu_check.scale import FULL, TINY


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder("check:it", tmp_path / "rows.jsonl", time.time() + 100)


def rows_of(recorder: Recorder) -> list[Row]:
    return read_rows(recorder._path)


class TestRows:
    def test_every_end_of_a_case_is_a_row(self, recorder: Recorder) -> None:
        def raising(error: Exception) -> dict[str, float]:
            raise error

        recorder.run("good", lambda: {"us": 1.5})
        recorder.run("wrong", lambda: raising(CheckFailed("3 differ")))
        recorder.run("broken", lambda: raising(RuntimeError("no\nkernel")))
        recorder.run("absent", lambda: raising(Missing("not installed")))
        recorder.run("late", lambda: raising(NoTime("not compiled in time")))
        recorder.run("timed", dict, "measured")
        rows = rows_of(recorder)
        status = [row.status for row in rows]
        assert status == ["passed", "failed", "error", "missing", "skipped", "measured"]
        assert rows[0] == Row("check:it", "good", "passed", {"us": 1.5}, "")
        assert rows[2].detail == "RuntimeError: no kernel"

    def test_a_case_that_would_not_fit_is_skipped(self, tmp_path: Path) -> None:
        recorder = Recorder("it", tmp_path / "rows.jsonl", time.time() + 0.3)
        recorder.run("slow", lambda: time.sleep(0.2) or {})
        recorder.run("next", lambda: {})
        assert [row.status for row in rows_of(recorder)] == ["passed", "skipped"]

    def test_a_line_that_was_cut_off_is_dropped(self, recorder: Recorder) -> None:
        recorder.write("one", "passed")
        with recorder._path.open("a") as file:
            file.write('{"section": "check:it", "ca')
        assert [row.case for row in rows_of(recorder)] == ["one"]
        assert read_rows(recorder._path.with_name("nothing")) == []


class TestMasks:
    @pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100])
    def test_packing_and_back(self, vocab_size: int) -> None:
        legal = masks.legal_tokens("half", 3, vocab_size)
        words = masks.pack(legal)
        assert words.dtype == np.int32
        assert words.shape == (3, -(-vocab_size // 32))
        np.testing.assert_array_equal(masks.unpack(words, vocab_size), legal)

    def test_the_format_is_that_of_the_kernels(self) -> None:
        legal = np.zeros((1, 70), bool)
        legal[0, [0, 33, 63]] = True
        assert masks.pack(legal).tolist() == [[1, 2 - 2**31, 0]]

    def test_legal_tokens_lie_in_few_tiles(self) -> None:
        legal = masks.legal_in_tiles(2, 3, 1000)
        tiles = np.flatnonzero(legal.any(axis=0)) // masks.TILE
        assert len(set(tiles.tolist())) == 2

    def test_bytes_by_all_ways_of_counting(self) -> None:
        legal = np.ones((1, 64), bool)
        legal[0, [0, 1, 20]] = False  # two sectors of eight float32
        assert masks.masked_sectors(legal, 4) == 2
        assert bitmask.traffic(legal, 4) == {
            "stored": 3 * 4 + 8,
            "sectors": 2 * 32 + 8,
            "effective": 2 * 64 * 4,
        }
        shares = measure.shares(10.0, {"stored": 20_000}, 4.0)
        assert shares == {"stored of copy": pytest.approx(0.5)}


class TestOracles:
    """They notice what they are for."""

    def test_wrong_bits_are_found(self) -> None:
        good = np.asarray([[0.0, 1.0]], np.float32)
        calls.require_same_bits(good.copy(), good, "it")
        with pytest.raises(CheckFailed, match=r"^it: 1 of 2 differ, the first at \(0, 0\)"):
            calls.require_same_bits(np.asarray([[-0.0, 1.0]], np.float32), good, "it")
        with pytest.raises(CheckFailed, match="float16"):
            calls.require_same_bits(good.astype(np.float16), good, "it")

    def test_illegal_tokens_are_found(self) -> None:
        words, enabled, _ = masked_sample.conditions(203)
        logits = masked_sample.logits_of(203, "float32")
        tokens = masked_sample.greedy_tokens(logits, words, enabled)
        masked_sample.require_legal(tokens, words, enabled, 203)
        legal = masks.unpack(words, 203)
        assert not tokens[~(legal.any(axis=-1) | (enabled == 0))].any()
        tokens[6, 1] = np.flatnonzero(~legal[6, 1])[0]
        with pytest.raises(CheckFailed, match=r"row \(6, 1\)"):
            masked_sample.require_legal(tokens, words, enabled, 203)

    def test_a_wrong_kernel_fails_its_checks(
        self, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Kernels that forget the mask, a bit of it, or a slot of the cache."""
        real = calls.kernel

        def wrong(package: str, implementation, interpret: bool):
            kernel = real(package, "xla", interpret)

            def run(*operands, **given):
                if package == "bitmask":
                    return kernel(operands[0], operands[1] | 2, operands[2])
                if package == "masked_sample":
                    return kernel(*operands)[:, ::-1]
                queries, k, v, slot_pos, positions = operands
                return kernel(queries, k, v, slot_pos, positions - 1, **given)

            return run if implementation == "triton" else kernel

        monkeypatch.setattr(calls, "kernel", wrong)
        monkeypatch.setattr(masked_sample, "MODES", ("greedy", "temperature"))
        monkeypatch.setattr(decode_attention, "CASES", decode_attention.CASES[:2])
        for module in (bitmask, masked_sample, decode_attention):
            module.check(recorder, TINY)
        by_case: dict[bool, set[str]] = {True: set(), False: set()}
        for row in rows_of(recorder):
            names_triton = row.case.startswith("triton") or "V=203, " in row.case
            by_case[names_triton].add(row.status)
        assert by_case == {True: {"failed"}, False: {"passed"}}

    def test_the_sampling_rows_differ(self) -> None:
        for mode in masked_sample.MODES:
            rows = masked_sample.rows_of(mode, 8)
            assert bool(np.asarray(rows.is_random).any()) == (mode != "greedy")
            assert bool(np.asarray(rows.is_filtered).any()) == (
                mode not in ("greedy", "temperature")
            )


class TestMeasure:
    def test_calls_are_neither_merged_nor_dropped(self) -> None:
        turns = measure.copies(jnp.zeros((4,)), 3)
        program = measure.Repeated(lambda x, y: x + y, turns, (jnp.ones((4,)),), in_place=True)
        program.compile()
        for _ in range(2):
            results = program._run()
        assert [result.tolist() for result in results] == [[2.0] * 4] * 3
        figures = program.time(TINY)
        assert set(figures) == {"us", "lowest_us", "enqueue"}
        assert figures["us"] >= figures["lowest_us"] > 0

    def test_time_is_that_of_one_call(self) -> None:
        figures = measure.time_runs(lambda: time.sleep(0.004), lambda _: None, 4, TINY)
        assert figures["lowest_us"] >= 1000
        assert figures["us"] < 100_000
        assert figures["enqueue"] == pytest.approx(1, abs=0.2)

    def test_a_program_that_fails_leaves_the_others(self) -> None:
        def bad() -> measure.Repeated:
            raise ValueError("no such kernel")

        def good() -> measure.Repeated:
            return measure.Repeated(lambda x: x + 1, [jnp.zeros((2,))])

        made = measure.compile_all({"bad": bad, "good": good}, 60)
        with pytest.raises(ValueError, match="no such kernel"):
            measure.time_made(made["bad"], TINY)
        assert measure.time_made(made["good"], TINY)["us"] > 0
        late = measure.compile_all({"slow": lambda: time.sleep(0.5)}, 0)  # type: ignore[dict-item]
        assert isinstance(late["slow"], NoTime)

    def test_arrays_in_turns_exceed_the_cache(self) -> None:
        assert measure.calls_for(32 << 20, FULL) * (32 << 20) >= FULL.rotate_bytes
        assert measure.calls_for(1, FULL) == measure.MOST_CALLS
        assert measure.calls_for(1 << 34, FULL) == FULL.least_calls


class TestReport:
    def rows(self, share: float, ours: float, guided: float) -> list[Row]:
        kernel = "xla"
        rows = [
            Row(
                "time:bitmask",
                names.mask("triton", 2, "float32", "half"),
                "measured",
                {"stored of copy": share, "sectors of copy": math.nan},
            ),
            Row(
                "time:masked_sample", names.sample("triton", 2, "greedy"), "measured", {"us": ours}
            ),
            Row(
                "time:peers",
                names.sample("xgrammar and torch", 2, "greedy"),
                "measured",
                {"us": 10.0},
            ),
        ]
        for kind, ms in (("unguided", 1.0), ("guided, few legal", guided)):
            case = names.decode(kernel, "device loop", 2, kind)
            rows.append(Row("decode:2", case, "measured", {"ms": ms}))
        return rows

    @pytest.mark.parametrize(
        ("figures", "met"), [((0.9, 9.0, 1.0), True), ((0.8, 11.0, 1.1), False)]
    )
    def test_verdicts(self, figures: tuple[float, float, float], met: bool) -> None:
        judged = report.verdicts(self.rows(*figures), TINY)
        measured = [verdict for verdict in judged if verdict.met is not None]
        assert [verdict.met for verdict in measured] == [met] * 3
        assert [verdict.value for verdict in measured] == pytest.approx(
            [figures[0], figures[1] / 10, figures[2]]
        )
        missing = [str(verdict) for verdict in judged if verdict.met is None]
        assert missing
        assert all("NOT MEASURED" in text for text in missing)
        assert ("MISSES" in str(measured[0])) != met

    def test_a_table_is_plain_text(self) -> None:
        rows = [
            Row("it", "one", "measured", {"us": 1.2345, "rows": 7}),
            Row("it", "another", "error", {}, "ValueError: no"),
        ]
        assert report.section_table("it", rows).splitlines() == [
            "it",
            "  case       status    us  rows",
            "  -------  --------  ----  ----",
            "  one      measured  1.23     7",
            "  another     error",
            "  another: ValueError: no",
        ]


class TestSections:
    def test_a_peer_that_is_not_installed_is_a_row(
        self, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
        peers.time(recorder, TINY)
        (row,) = rows_of(recorder)
        assert row.status == "missing"
        assert "torch is not installed" in row.detail

    def test_grammars_of_the_decode_loop(self) -> None:
        assert decode.grammar("unguided", 203) is None
        for kind, count in (("guided, few legal", 4), ("guided, all legal", 202)):
            grammar = decode.grammar(kind, 203)
            assert grammar is not None
            assert masks.unpack(grammar.row, 203).sum() == count
            matcher = grammar.matcher()
            row = np.zeros((1, 7), np.int32)
            matcher.fill_next_token_bitmask(row)
            np.testing.assert_array_equal(row[0], grammar.row)
            assert matcher.accept_token(202)
            assert not matcher.accept_token(0)

    def test_the_attention_oracle_sees_what_the_portable_implementation_sees(self) -> None:
        """Where positions shift by one, or the soft cap is another, they no longer agree."""
        (case,) = (case for case in decode_attention.CASES if case.name == "ring")
        given = decode_attention.operands(case, 40, 16)
        out, _, _ = decode_attention.oracle(case, given)
        given.positions[...] -= 1
        shifted, _, _ = decode_attention.oracle(case, given)
        assert np.abs(out - shifted).max() > 100 * decode_attention.TOLERANCES["float32"]

    def test_phases_have_every_section_once(self) -> None:
        shares = [share for share, _ in command.phases(FULL)]
        assert shares == sorted(shares)
        assert shares[-1] < 1
        sections = [name for _, names in command.phases(FULL) for name in names]
        assert len(set(sections)) == len(sections) == 11

    def test_without_a_gpu_it_says_so_in_one_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fake = SimpleNamespace(
            detail="cpu: cpu", section="facts", case="", status="passed", figures={}
        )
        monkeypatch.setattr(command, "run_sections", lambda *_: [fake])
        monkeypatch.setattr(report, "environment", lambda commit: {})
        assert command.main(["--out", str(tmp_path)]) == command.EXIT_NO_GPU
        assert capsys.readouterr().out.splitlines()[-1].startswith("error: JAX sees no GPU here")
        assert list(tmp_path.iterdir()) == []

    def test_a_section_that_hangs_or_crashes_leaves_its_rows(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script = (
            "import json, sys, time; "
            "row = dict(section=sys.argv[1], case='first', status='passed'); "
            "open(sys.argv[2], 'w').write(json.dumps(row) + chr(10)); "
            "print('a last word'); sys.stdout.flush(); "
            "time.sleep(60) if sys.argv[1] == 'hangs' else sys.exit(7)"
        )

        def start(name: str, until: float, dry_run: bool, folder: Path) -> subprocess.Popen[bytes]:
            with (folder / f"{name}.log").open("wb") as log:
                arguments = [name, str(folder / f"{name}.jsonl")]
                return subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=log)

        monkeypatch.setattr(command, "_start", start)
        monkeypatch.setattr(command, "GRACE_S", 0.0)
        until = time.time() + 2
        rows = command.run_sections(["hangs", "crashes"], until, True, tmp_path, 2)
        assert [(row.section, row.case, row.status) for row in rows] == [
            ("hangs", "first", "passed"),
            ("hangs", "the whole section", "skipped"),
            ("crashes", "first", "passed"),
            ("crashes", "the whole section", "error"),
        ]
        assert rows[3].detail == "exit status 7: a last word"


def test_the_commit_may_be_given() -> None:
    about = report.environment("abc")
    assert about["commit"] == "abc"
    assert about["versions"]["numpy"] == np.__version__


def dry_run(folder: Path, *arguments: str) -> dict:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "--dry-run", "--out", folder, *arguments],
        cwd=command.ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    results: dict = json.loads((folder / "gpu_check_dry_run.json").read_text())
    assert results["environment"]["versions"]["jax"] == jax.__version__
    statuses = {row["status"] for row in results["rows"]}
    assert statuses <= {"passed", "measured"}, run.stdout
    return results


def test_dry_run_of_some_sections(tmp_path: Path) -> None:
    results = dry_run(tmp_path, "--only", "bitmask,decode:")
    sections = {row["section"] for row in results["rows"]}
    assert sections == {"facts", "check:bitmask", "time:bitmask", "decode:2"}


@pytest.mark.full
def test_dry_run_of_everything(tmp_path: Path) -> None:
    results = dry_run(tmp_path, "--minutes", "6")
    wanted = {name for _, names in command.phases(TINY) for name in names}
    assert {row["section"] for row in results["rows"]} == wanted | {"facts"}
    assert [v for v in results["verdicts"] if "guided" in v["what"] and v["value"] is None] == []
