#!/usr/bin/env python3
"""Opens a report in headless Chromium and checks what a browser makes of it.

usage: tests/browser/report.py REPORT.html [SCREENSHOTS]     SCREENSHOTS: a directory for pictures

Checks at 1280 and 400 pixels, in the light and the dark theme: no message on the console, no request,
no horizontal scrolling of the page, text and graphics with the contrast of WCAG 2.2 AA. Also: every
table can be sorted with the keyboard alone, everything that scrolls can be reached with it, without
JavaScript all tables are there, and the page prints. Needs Debian's chromium; exits 77 without it.
"""
import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

failures = []


def check(good, message):
    if not good:
        failures.append(message)
        print("FAIL:", message)


class Browser:
    """Chromium, spoken to in its DevTools protocol over a pair of pipes."""

    def __init__(self, path):
        self.profile = tempfile.mkdtemp()
        to_read, self.to = os.pipe()
        self.from_, from_write = os.pipe()

        def descriptors():
            a, b = os.dup(to_read), os.dup(from_write)
            os.dup2(a, 3)
            os.dup2(b, 4)

        self.process = subprocess.Popen(
            [path, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
             "--hide-scrollbars", "--force-device-scale-factor=1",
             "--user-data-dir=" + self.profile, "about:blank"],
            preexec_fn=descriptors, close_fds=False, stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL)
        os.close(to_read)
        os.close(from_write)
        self.rest, self.number, self.session, self.events = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def read(self):
        while b"\0" not in self.rest:
            data = os.read(self.from_, 1 << 20)
            if not data:
                raise SystemExit("chromium ended")
            self.rest += data
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise SystemExit(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def wait(self, method):
        while not any(e.get("method") == method for e in self.events):
            self.events.append(self.read())

    def run(self, script):
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise SystemExit(f"{script[:60]}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def key(self, name, code):
        for kind in "keyDown", "keyUp":
            self.call("Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=code,
                      **({"text": "\r"} if name == "Enter" and kind == "keyDown" else {}))

    def close(self):
        self.process.terminate()
        self.process.wait()
        shutil.rmtree(self.profile, ignore_errors=True)


# Text whose colour against its background has less than 4.5 : 1 (3 : 1 where it is large), and marks
# of charts with less than 3 : 1.
CONTRAST = r"""
(() => {
  const parse = c => (c.match(/[\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= .04045 ? v / 12.92
    : ((v + .055) / 1.055) ** 2.4).reduce((s, v, i) => s + v * [.2126, .7152, .0722][i], 0);
  const ratio = (a, b) => { a = light(a); b = light(b); return (Math.max(a, b) + .05) / (Math.min(a, b) + .05); };
  const behind = e => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const bad = {};
  for (const e of document.body.querySelectorAll('*')) {
    const style = getComputedStyle(e), tag = e.tagName.toLowerCase();
    if (tag === 'script' || tag === 'title' || (!e.ownerSVGElement && !e.getClientRects().length)) continue;
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    let colour = own ? style.color : null, least = 4.5;
    if (e.ownerSVGElement) {
      least = tag === 'text' ? 4.5 : 3;
      colour = tag === 'text' ? style.fill : /\b[pb]\d|\bfront/.test(e.className.baseVal)
        ? (style.fill === 'none' ? style.stroke : style.fill)
        : /\bl\d/.test(e.className.baseVal) ? style.stroke : null;
    }
    if (!colour) continue;
    const value = ratio(parse(colour), behind(e.ownerSVGElement || e));
    if (value < least) bad[`${tag}.${e.className.baseVal ?? e.className}`] = value.toFixed(2);
  }
  return bad;
})()
"""


def main():
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        print("SKIP: no chromium (Debian: chromium)")
        sys.exit(77)
    page = "file://" + os.path.abspath(sys.argv[1])
    pictures = sys.argv[2] if len(sys.argv) > 2 else None
    if pictures:
        os.makedirs(pictures, exist_ok=True)
    b = Browser(chromium)
    try:
        check_page(b, page, pictures)
    finally:
        b.close()
    print(f"{'failed' if failures else 'passed'}: {sys.argv[1]}")
    sys.exit(bool(failures))


def load(b, page):
    b.events = [e for e in b.events if e.get("method") != "Page.loadEventFired"]
    b.call("Page.navigate", url=page)
    b.wait("Page.loadEventFired")


def check_page(b, page, pictures):
    for domain in "Page", "Runtime", "Log", "Network":
        b.call(domain + ".enable")
    for width in 1280, 400:
        for theme in "light", "dark":
            b.call("Emulation.setDeviceMetricsOverride", width=width, height=900,
                   deviceScaleFactor=1, mobile=False)
            b.call("Emulation.setEmulatedMedia", media="screen",
                   features=[{"name": "prefers-color-scheme", "value": theme}])
            load(b, page)
            name = f"{width}-{theme}"
            wide = b.run("document.documentElement.scrollWidth")
            check(wide <= width, f"{name}: the page is {wide} pixels wide")
            b.run("document.querySelectorAll('details').forEach(d => d.open = true)")
            wide = b.run("document.documentElement.scrollWidth")
            check(wide <= width, f"{name}: with all tables open the page is {wide} pixels wide")
            bad = b.run(CONTRAST)
            check(not bad, f"{name}: low contrast: {bad}")
            if pictures:
                b.run("document.querySelectorAll('details').forEach(d => d.open = false)")
                height = min(b.run("document.documentElement.scrollHeight"), 12000)
                picture = b.call("Page.captureScreenshot", captureBeyondViewport=True,
                                 clip={"x": 0, "y": 0, "width": width, "height": height, "scale": 1})
                with open(os.path.join(pictures, name + ".png"), "wb") as f:
                    f.write(base64.b64decode(picture["data"]))
    check_keyboard(b)
    check_data(b)
    check_events(b, page)
    check_print(b, pictures)
    check_without_script(b, page)


def check_keyboard(b):
    """Tab reaches every link, button, summary and scrolling region; Enter sorts."""
    wanted = b.run("document.querySelectorAll('details').forEach(d => d.open = true);"
                   "[...document.querySelectorAll('a,button,summary,[tabindex]')].forEach((e, i) => e.dataset.i = i);"
                   "document.querySelectorAll('[data-i]').length")
    b.run("document.activeElement.blur(); window.scrollTo(0, 0)")
    seen = set()
    for _ in range(wanted + 5):
        b.key("Tab", 9)
        at = b.run("document.activeElement.dataset.i ?? ''")
        if at == "" or at in seen:
            break
        seen.add(at)
        outline = b.run("getComputedStyle(document.activeElement).outlineStyle")
        check(outline != "none", f"the focus is not visible on element {at}")
    check(len(seen) == wanted, f"the keyboard reaches {len(seen)} of {wanted} elements")
    b.run("window.t = [...document.querySelectorAll('table[data-sort]')].find(t => t.tBodies[0].rows.length > 2);"
          "window.h = t && t.querySelector('thead th.n'); h && h.firstChild.focus()")
    if not b.run("!!h"):
        return
    column = "[...t.tBodies[0].rows].map(r => parseFloat(r.cells[h.cellIndex].textContent)).filter(v => v === v)"
    for direction, order in ("ascending", 1), ("descending", -1):
        b.key("Enter", 13)
        check(b.run("h.getAttribute('aria-sort')") == direction, f"Enter does not sort {direction}")
        values = b.run(column)
        check(values == sorted(values)[::order], f"not {direction}: {values[:5]}")


def check_data(b):
    """The JSON parses, has every table, and every id is unique."""
    tables = b.run("JSON.parse(document.getElementById('data').textContent).sections.flatMap(s => s.tables).length")
    shown = b.run("document.querySelectorAll('table').length")
    check(tables == shown, f"{shown} tables, but {tables} in the JSON")
    check(b.run("(ids => ids.length - new Set(ids).size)([...document.querySelectorAll('[id]')].map(e => e.id))") == 0,
          "an id is used twice")
    check(b.run("window.hostile === undefined"), "a name was executed")


def check_events(b, page):
    b.run("0")
    for e in b.events:
        method, params = e.get("method"), e.get("params", {})
        if method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            check(url.split("#")[0] == page, f"request: {url[:100]}")
        check(method not in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"),
              f"console: {json.dumps(params)[:300]}")


def check_print(b, pictures):
    b.call("Emulation.clearDeviceMetricsOverride")
    b.call("Emulation.setEmulatedMedia", media="")
    pdf = base64.b64decode(b.call("Page.printToPDF", printBackground=False)["data"])
    pages = len(re.findall(rb"/Type\s*/Page\b", pdf))
    check(pdf.startswith(b"%PDF") and 1 <= pages <= 60, f"printing gives {pages} pages")
    if pictures:
        with open(os.path.join(pictures, "print.pdf"), "wb") as f:
            f.write(pdf)


def check_without_script(b, page):
    rows = b.run("document.querySelectorAll('tr').length")
    b.call("Emulation.setScriptExecutionDisabled", value=True)
    load(b, page)
    # The page's script cannot run now; the debugger's can.
    check(b.run("document.querySelectorAll('tr').length") == rows, "rows are missing without JavaScript")
    check(b.run("document.querySelectorAll('button').length") == 0, "buttons without JavaScript do nothing")
    b.call("Emulation.setScriptExecutionDisabled", value=False)


main()
