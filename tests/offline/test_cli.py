"""Arguments of the batch command that cannot be used are said so before anything starts."""

from __future__ import annotations

import argparse
import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import resource_tracker, util
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.offline import cli, progress
from sgl_prefix_attn.offline.engines import EngineArguments, EngineError, EnginePool
from sgl_prefix_attn.offline.journal import Finished, Journal
from sgl_prefix_attn.offline.progress import Progress
from sgl_prefix_attn.offline.runner import journal_of
from tests.offline import batches, one_answer

REPOSITORY = Path(__file__).parents[2]


def parsed(*arguments: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args([*map(str, arguments), "--model", "m", "--device", "cpu"])


@pytest.fixture
def source(tmp_path):
    return batches.write(tmp_path / "in.jsonl", [batches.line(0, [1])])


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory, monkeypatch):
    """The system's folder for temporary files; whatever happens, a command leaves nothing there."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def test_a_killed_process_leaves_no_temporary_folder(temporary):
    code = (
        "import os, signal; from sgl_prefix_attn.offline.temporary import temporary_folder; "
        "folder = temporary_folder('killed-').folder; (folder / 'log').touch(); print(folder, flush=True); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    environ = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == -signal.SIGKILL
    folder = Path(done.stdout.strip())
    assert folder.parent == temporary
    for _ in range(200):
        if not folder.exists():
            break
        time.sleep(0.05)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out.journal"), 1),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "out.journal"), 1),
        (OSError(errno.EFBIG, os.strerror(errno.EFBIG), "out.journal"), 1),
        (OSError(errno.EACCES, os.strerror(errno.EACCES), "out.journal"), 2),
        (EngineError("engine 0 ended with status 3"), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("results", [[], [Finished(1, ok=True, record={})]], ids=["no result", "a result"])
def test_a_failure_says_that_the_journal_has_the_results(error, status, results, source, tmp_path, capsys, monkeypatch):
    def run_batch(*_):
        raise error

    monkeypatch.setattr(cli, "run_batch", run_batch)
    args = parsed(source, tmp_path / "out.jsonl", "--quiet")
    args.model = str(tmp_path)  # a model folder without a tokenizer
    journal = Journal(journal_of(args.output), source, "m")
    journal.append(results)
    journal.close()
    assert cli.run(args) == status
    message = capsys.readouterr().err
    assert str(error) in message
    more = f"what had finished is in {journal.path}; run the same command again to go on"
    assert (more in message) == bool(results)


def test_an_interrupted_run_says_that_the_journal_has_the_results(source, tmp_path, capsys, monkeypatch):
    def run_batch(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_batch", run_batch)
    args = parsed(source, tmp_path / "out.jsonl", "--quiet")
    args.model = str(tmp_path)
    journal = Journal(journal_of(args.output), source, "m")
    journal.append([Finished(1, ok=True, record={})])
    journal.close()
    with pytest.raises(KeyboardInterrupt):
        cli.run(args)
    assert f"batch: interrupted\nbatch: what had finished is in {journal.path}" in capsys.readouterr().err


def test_restart_discards_the_results_of_a_run_with_another_model(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sgl_prefix_attn.offline.engine_process.main", one_answer.main)
    output = tmp_path / "out.jsonl"
    command = ["batch", *map(str, (source, output)), "--model", str(tmp_path), "--device", "cpu", "--quiet"]
    journal = Journal(journal_of(output), source, "another model")
    journal.append([Finished(1, ok=True, record={"of": "another model"})])
    journal.close()
    before = journal_of(output).read_bytes()
    assert main(command) == 1
    assert "with the model 'another model'" in (told := capsys.readouterr().err)
    assert "--restart starts anew" in told
    assert journal_of(output).read_bytes() == before
    assert main([*command, "--restart"]) == 0
    told = capsys.readouterr().out
    assert "1 of 1 requests succeeded" in told
    assert "earlier runs" not in told
    assert [entry["custom_id"] for entry in batches.read(output)] == [batches.line(0, [1])["custom_id"]]
    assert not journal_of(output).exists()


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_run_without_standard_streams(closed, source, tmp_path, temporary):
    """The shell has closed them: the engine still has a log, and no file of the run gets the number of one."""
    code = (
        "import sys; from sgl_prefix_attn.offline import engine_process; "
        "from sgl_prefix_attn.__main__ import main; from tests.offline import one_answer; "
        "engine_process.main = one_answer.main; "
        f"sys.exit(main(['batch', {str(source)!r}, {str(tmp_path / 'out')!r}, '--model', {str(tmp_path)!r}]))"
    )
    environ = {**os.environ, "TMPDIR": str(temporary), "CUDA_VISIBLE_DEVICES": ""}
    command = f'exec "$0" -c "$1" {closed}'
    done = subprocess.run(["bash", "-c", command, sys.executable, code], cwd=REPOSITORY, env=environ, check=False)
    assert done.returncode == 0
    assert len((tmp_path / "out").read_text().splitlines()) == 1


def test_what_a_run_does_stands_beside_its_bar(capsys):
    Progress().say("loading the model")
    assert capsys.readouterr() == ("", "loading the model\n")


def test_a_log_gets_whole_lines_of_the_bar(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_SECONDS_OF_A_LINE", 0.0)
    with Progress() as bar:
        bar.start(total=10, done=2)
        bar.advance(3, 100, 10, 0.5)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2  # one when it advanced, one at the end
    assert all("5/10" in line and "50% of prompts cached" in line for line in lines)


def test_engines_that_start_do_not_take_ctrl_c(monkeypatch):
    """Until they ignore the signal they would end with a traceback. Python's resource tracker starts with the first."""
    masks, spawn, tracker = [], util.spawnv_passfds, resource_tracker.ResourceTracker()

    def noted(*arguments):
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        return spawn(*arguments)

    monkeypatch.setattr(util, "spawnv_passfds", noted)
    for name in ("ensure_running", "getfd"):
        monkeypatch.setattr(resource_tracker, name, getattr(tracker, name))
    with EnginePool(one_answer.main, [EngineArguments(())] * 2) as pool:
        pool.check([])
    os.close(tracker.getfd())
    assert [signal.SIGINT in mask for mask in masks] == [True] * 3
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_ctrl_c_while_an_engine_starts_leaves_none(monkeypatch):
    """The signal waits until the process is started, then ends the run; nothing else would stop the process."""
    start = BaseProcess.start

    def interrupted(process):
        signal.raise_signal(signal.SIGINT)
        start(process)

    resource_tracker.ensure_running()  # else its start takes the signal
    monkeypatch.setattr(BaseProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        EnginePool(one_answer.main, [EngineArguments(())])
    assert not multiprocessing.active_children()


def test_without_grouping_no_scheduler_has_our_hooks(source, tmp_path):
    (engine,) = cli._options(parsed(source, tmp_path / "o", "--no-grouping"), tmp_path).engines
    assert dict(engine.environment)["PREFIXPACK_GROUP_SCHEDULING"] == "0"


def test_only_engines_that_start_replace_the_log(source, tmp_path):
    log = tmp_path / "logs" / "engine-0.log"
    log.parent.mkdir()
    log.write_text("of a run that still runs")
    args = parsed(source, tmp_path / "out", "--log", log.parent)
    args.model = str(tmp_path)
    running = Journal(journal_of(args.output), source, args.model)
    assert cli.run(args) == 1  # refused
    running.close()
    assert log.read_text() == "of a run that still runs"


def test_unusable_arguments_end_with_status_2(source, tmp_path, capsys):
    existing = tmp_path / "existing.jsonl"
    existing.touch()
    fifo, folder = tmp_path / "fifo", tmp_path / "folder"
    os.mkfifo(fifo)
    folder.mkdir()
    journal, scratch = tmp_path / "out.journal", tmp_path / "out.unfinished"
    batches.write(journal, [batches.line(0, [1])])
    batches.write(scratch, [batches.line(0, [1])])
    for arguments, message in (
        ([tmp_path / "none", tmp_path / "out"], "no such file"),
        ([folder, tmp_path / "out"], "folder: not a regular file"),
        ([source, ""], "expected the name of a file"),
        ([source, "/"], "OUT /: expected the name of a file"),
        ([source, tmp_path / "out", "--errors", "/"], "--errors /: expected the name of a file"),
        ([source, tmp_path / "out", "--server-args", "a 'b"], '--server-args "a \'b": No closing quotation'),
        ([source, tmp_path / "out", "--server-args", "--model-pa x"], "give the model and the device as --model and"),
        ([source, tmp_path / "out", "--server-args", "--device cuda"], "give the model and the device as --model and"),
        ([source, tmp_path / "out", "--engines", 0], "--engines 0: expected at least 1"),
        ([source, tmp_path / "out", "--window", -1], "--window -1: expected at least 1"),
        ([source, source], "must be three different files"),
        ([source, tmp_path / "out", "--errors", source], "must be three different files"),
        ([source, tmp_path / "out", "--errors", tmp_path / "." / "out"], "must be three different files"),
        ([journal, tmp_path / "out"], "out.journal is both IN and the journal"),
        ([source, tmp_path / "out", "--errors", journal], "out.journal is both the errors file and the journal"),
        ([scratch, tmp_path / "out"], "out.unfinished is both IN and OUT while it is written"),
        ([source, tmp_path / "out", "--errors", scratch], "out.unfinished is both the errors file and OUT while"),
        ([source, existing], "existing.jsonl exists; --overwrite replaces it"),
        ([source, tmp_path / "new", "--errors", existing], "existing.jsonl exists; --overwrite replaces it"),
        ([source, tmp_path / "new", "--errors", tmp_path / "none" / "errors"], "none: no such folder"),
        ([source, tmp_path / "none" / "out"], "none: no such folder"),
        ([source, fifo, "--overwrite"], "fifo is not a regular file"),
        ([source, tmp_path / "new", "--errors", fifo, "--overwrite"], "fifo is not a regular file"),
        ([source, tmp_path / "new", "--errors", folder, "--overwrite"], "folder is not a regular file"),
    ):
        assert cli.run(parsed(*arguments)) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["/proc", "/sys"])
def test_an_output_where_no_file_can_be_is_told_by_its_name(folder, source, capsys):
    assert cli.run(parsed(source, f"{folder}/out.jsonl")) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"batch: OUT {folder}/out.jsonl: cannot write to {folder}: ")
    assert ".journal" not in told


def test_a_file_in_another_encoding_ends_with_status_2_and_leaves_no_journal(source, tmp_path, capsys):
    source.write_bytes(source.read_text().encode("utf-16"))
    assert cli.run(parsed(source, tmp_path / "out")) == 2
    assert (
        capsys.readouterr().err
        == f"batch: {source}: UTF-16 or UTF-32 text; write it as UTF-8, as with iconv -t UTF-8\n"
    )
    assert not journal_of(tmp_path / "out").exists()


def test_ray_that_is_not_installed_is_said_so(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.run(parsed(source, tmp_path / "out", "--ray")) == 2
    assert "Ray is not installed: pip install 'sgl-prefix-attn[ray]'" in capsys.readouterr().err


def test_an_output_with_its_journal_is_one_to_go_on_with(source, tmp_path):
    existing = tmp_path / "out.jsonl"
    existing.touch()
    (tmp_path / "out.jsonl.journal").touch()
    assert cli._options(parsed(source, existing), tmp_path).output == existing


def test_another_errors_file_that_exists_is_kept_when_a_job_goes_on(source, tmp_path):
    output, first, existing = (tmp_path / name for name in ("out.jsonl", "first.jsonl", "existing.jsonl"))
    Journal(journal_of(output), source, "m", first).close()
    for path in (first, existing):
        path.touch()
    assert cli._options(parsed(source, output, "--errors", first), tmp_path).errors == first
    with pytest.raises(cli.UsageError, match=r"existing\.jsonl exists; --overwrite replaces it"):
        cli._options(parsed(source, output, "--errors", existing), tmp_path)
    assert cli._options(parsed(source, output, "--errors", existing, "--overwrite"), tmp_path).errors == existing


def test_the_engines_arguments(source, tmp_path):
    text = "--attention-backend torch_native --dtype=bfloat16"
    options = cli._options(parsed(source, tmp_path / "o.jsonl", "--engines", 2, "--server-args", text), tmp_path)
    first, second = (engine.arguments for engine in options.engines)
    assert first == second
    assert first[-5:] == ("--model-path", "m", *text.split(), "--disable-cuda-graph")[-5:]
    assert first.index("--device") < first.index("prefixpack") < first.index("--model-path")
    assert options.errors == tmp_path / "o.errors.jsonl"
    assert [engine.log for engine in options.engines] == [tmp_path / "engine-0.log", tmp_path / "engine-1.log"]


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("--tp-size 2 --pp=2", "048"),
        ("--tp-size 2 --dp-size 2 --base-gpu-id=1", "159"),
        ("--tp 2 --data-parallel-size 2 --enable-dp-attention --base-gpu-id 3", "357"),
        ("--gpu-id-step 2 --base-gpu-id 1", "135"),
    ],
)
def test_engines_have_gpus_of_their_own(source, tmp_path, text, first):
    args = parsed(source, tmp_path / "o", "--engines", 3, "--server-args", text)
    args.device = "cuda"
    options = cli._options(args, tmp_path)
    assert [engine.arguments[-2:] for engine in options.engines] == [("--base-gpu-id", number) for number in first]


def test_the_file_of_config_is_read_as_sglang_reads_it(source, tmp_path):
    """Arguments of the command line win over the file's, and these over our defaults."""
    config = tmp_path / "engine.yaml"
    config.write_text(
        "model-path: other\ntp-size: 2\ntrust-remote-code: true\nenable-metrics: false\nbase-gpu-id: 7\n"
        "attention-backend: fa3\ncuda-graph-bs-decode: [1, 8]\ntokenizer-path: words\n"
    )
    text = f"--base-gpu-id 1 --config {config} --pp-size 2"
    args = parsed(source, tmp_path / "o", "--engines", 2, "--server-args", text)
    args.device = "cuda"
    first, second = (engine.arguments for engine in cli._options(args, tmp_path).engines)
    assert (first[-2:], second[-2:]) == (("--base-gpu-id", "1"), ("--base-gpu-id", "5"))
    read = cli.read_options(first)
    assert (read.model_path, read.tokenizer_path) == ("m", "words")
    assert not {"--config", "--enable-metrics"} & {*first}
    assert first.index("prefixpack") < first.index("fa3")  # SGLang takes the last
    at = first.index("--cuda-graph-bs-decode")
    assert first[at : at + 4] == ("--cuda-graph-bs-decode", "1", "8", "--tokenizer-path")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "Config file not found"),
        ("[1]", "Config file must contain a dictionary"),
        ("a: [", "while parsing"),
        ("1: 2", "int"),
        ("tp-size: two", "argument --tp-size/--tp"),
    ],
)
def test_a_config_file_that_cannot_be_read_is_an_unusable_argument(content, message, source, tmp_path, capsys):
    config = tmp_path / "engine.yaml"
    if content is not None:
        config.write_text(content)
    assert cli.run(parsed(source, tmp_path / "o", "--server-args", f"--config {config}")) == 2
    error = capsys.readouterr().err
    assert "--server-args: " in error
    assert message in error


def test_an_engine_takes_gpus_of_a_ray_cluster_for_all_its_ranks(source, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "connect", lambda address: address)
    text = "--tp-size 2 --dp-size 2 --base-gpu-id 4"
    args = parsed(source, tmp_path / "o", "--ray", "--engines", 2, "--server-args", text)
    args.device = "cuda"
    options = cli._options(args, tmp_path)
    assert cli._start(args, options).keywords == {"gpus": 4}
    assert all(engine.arguments.count("--base-gpu-id") == 1 for engine in options.engines)


def test_a_size_that_is_no_number_is_an_unusable_argument(source, tmp_path, capsys):
    assert cli.run(parsed(source, tmp_path / "o", "--server-args", "--tp-size two")) == 2
    assert "--server-args: argument --tp-size/--tp" in capsys.readouterr().err
