#!/usr/bin/env bash
# Draw docs/view.png and docs/view_dark.png anew: the page of `view`, for the demo's checkpoint.
# It needs Chromium (apt-get install chromium). Run it after a change of heads/page.*.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
.venv/bin/python -m mixhead_plugin.analysis view examples/demo/pretrained/translator.pt \
    --text 'die traurige Postkarte kann in zwei Wochen übersetzt werden .' --output "$work/heads.html"

# Click as a reader would: how the decoder finds "Postkarte", the next word to write.
click='setTimeout(() => document.querySelectorAll("#matrix .side > *")[2].click(), 500)'
sed -i "s|</body>|<script>$click</script></body>|" "$work/heads.html"

draw() { # file, number of the theme in Chromium
    chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$work/profile" \
        --blink-settings="preferredColorScheme=$2" --virtual-time-budget=5000 --window-size=1384,1424 \
        --screenshot="$work/$1" "file://$work/heads.html"
    # 256 colours are enough, and take a third of the space
    .venv/bin/python -c 'import sys; from PIL import Image
picture = Image.open(sys.argv[1]).convert("RGB")
picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(sys.argv[2], optimize=True)' \
        "$work/$1" "docs/$1"
}
draw view.png 1
draw view_dark.png 0
