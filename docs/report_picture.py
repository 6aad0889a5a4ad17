"""Make ``docs/report.png`` from the README's first example; needs Chromium (Debian: ``apt-get install chromium``).

python docs/report_picture.py
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import fxfuse

DOCS = Path(__file__).parent
QUIET = "--no-first-run --disable-background-networking --disable-component-update --disable-sync"


def main() -> None:
    block = re.search(r"^```python\n(.*?)^```$", (DOCS.parent / "README.md").read_text(), re.S | re.M)
    assert block
    with tempfile.TemporaryDirectory() as folder:
        script, page = Path(folder, "train.py"), Path(folder, "report.html")
        script.write_text(block[1])  # so that the report can quote its lines
        exec(compile(block[1], str(script), "exec"), {"__name__": "train"})
        print(fxfuse.last_report())
        fxfuse.last_report().save(page)
        chromium = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", *QUIET.split(), f"--user-data-dir={folder}/c"]
        picture = ["--window-size=1500,500", f"--screenshot={DOCS / 'report.png'}", page.as_uri()]
        subprocess.run([*chromium, *picture], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
