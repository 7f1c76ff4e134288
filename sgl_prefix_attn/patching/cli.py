"""`python -m sgl_prefix_attn patch apply|revert|check|list`."""

from __future__ import annotations

import argparse
import sys
import textwrap

from sgl_prefix_attn.patching.change import State, change, inspect, overall
from sgl_prefix_attn.patching.diffs import SeamPatch, load_patches, patches_for, version_key
from sgl_prefix_attn.patching.errors import EXIT_DONE, EXIT_MODIFIED, EXIT_NOT_APPLIED, EXIT_UNUSABLE, PatchError
from sgl_prefix_attn.patching.installation import Installation, find_installation

_EXIT_STATUS = """exit status:
  0  check: applied. apply, revert: done, or nothing to do
  1  check: not applied
  2  no usable SGLang, no diff for its version, or its files cannot be read or written
  3  files are neither as published nor published plus diff, or the diff is applied to some files only"""

_ACTIONS = {
    "apply": "apply the diffs for the installed version",
    "revert": "take the diffs out again",
    "check": "say whether the diffs are applied",
    "list": "list all diffs, their versions and reasons",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Adds our native seams to an installed SGLang, removes them, or says whether they are there.\n"
        "A seam is a small diff that SGLang itself could merge; the backend uses it instead of its\n"
        "hooks where it is applied. Restart a running server afterwards."
    )
    parser.epilog = _EXIT_STATUS
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action, summary in _ACTIONS.items():
        subparser = actions.add_parser(action, help=summary)
        if action != "list":
            subparser.add_argument(
                "--sglang-path", metavar="DIR", help="work on the package sglang in DIR, not on the installed one"
            )
        if action in ("apply", "revert"):
            subparser.add_argument("--dry-run", action="store_true", help="say what would be done, change nothing")


def run(args: argparse.Namespace) -> int:
    try:
        if args.action == "list":
            return _list(load_patches())
        sglang = find_installation(args.sglang_path)
        patches = patches_for(sglang.version, load_patches())
        if args.action == "check":
            return max(_check(patch, sglang) for patch in patches)
        goal = State.APPLIED if args.action == "apply" else State.NOT_APPLIED
        for patch in patches:
            _change(patch, sglang, goal, args.dry_run)
        return EXIT_DONE
    except PatchError as error:
        print(error, file=sys.stderr)
        return error.status
    except OSError as error:
        print(f"cannot read {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_UNUSABLE


def _list(patches: list[SeamPatch]) -> int:
    for name in sorted({patch.name for patch in patches}):
        same_seam = [patch for patch in patches if patch.name == name]
        versions = sorted((version for patch in same_seam for version in patch.versions), key=version_key)
        newest = same_seam[-1]
        print(f"{name}: sglang {' '.join(versions)}")
        for text in (newest.summary, newest.reason, *newest.files):
            print(textwrap.fill(text, 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False))
    return EXIT_DONE


def _check(patch: SeamPatch, sglang: Installation) -> int:
    reports = inspect(patch, sglang)
    state = overall(reports)
    print(f"{patch.name}: {state.value} ({sglang})")
    if state in (State.MODIFIED, State.PARTLY_APPLIED):
        for report in reports:
            print(f"  {report.state.value if (sglang.root / report.path).exists() else 'missing'}: {report.path}")
        return EXIT_MODIFIED
    return EXIT_DONE if state is State.APPLIED else EXIT_NOT_APPLIED


def _change(patch: SeamPatch, sglang: Installation, goal: State, dry_run: bool) -> None:
    files = change(patch, sglang, goal, dry_run)
    done = "applied to" if goal is State.APPLIED else "reverted in"
    if not files:
        done = "already applied to" if goal is State.APPLIED else "was not applied to"
    elif dry_run:
        done = f"would be {done}"
    print(f"{patch.name}: {done} {sglang}")
    for file in files:
        print(f"  {file}")
