"""Print the coverage of the tests, and the modules with less than 90%."""

import json
import sys
from pathlib import Path

MIN_COVERAGE = 90


def main() -> None:
    """Read the report at the path of the first argument."""
    report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    shares = {name: file["summary"]["percent_covered"] for name, file in report["files"].items()}
    print(f"coverage: {report['totals']['percent_covered']:.1f}% of the lines")
    for name, share in sorted(shares.items(), key=lambda pair: pair[1]):
        if share < MIN_COVERAGE:
            print(f"  below {MIN_COVERAGE}%: {name} {share:.0f}%")


main()
