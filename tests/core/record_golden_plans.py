"""Records the digests that test_golden_plans.py compares with: python -m tests.core.record_golden_plans

Run it after a deliberate change of plans. A change of the inputs or forests is refused unless --all is given.
"""

from __future__ import annotations

import argparse
import json
import sys

from tests.core.golden_plans import DIGESTS, GROUPS, digests_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="record changed inputs and forests too")
    everything = parser.parse_args().all
    before = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    after = {group: digests_of(group) for group in GROUPS}
    changed = {
        f"{group}: {part}"
        for group, digests in after.items()
        for part, digest in digests.items()
        if digest != before.get(group, {}).get(part)
    }
    print("\n".join(sorted(changed)) or "nothing has changed")
    if before and not everything and any(not name.endswith("plans") for name in changed):
        print("inputs or forests have changed; --all records them", file=sys.stderr)
        return 1
    DIGESTS.parent.mkdir(exist_ok=True)
    DIGESTS.write_text(json.dumps(after, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
