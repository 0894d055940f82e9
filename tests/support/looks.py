"""Checks of a page in a browser: it fits, it is readable, it loads nothing from elsewhere."""

from __future__ import annotations

from typing import Any

from tests.support.browser import Page

FAINT = """(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const [r, g, b, a = 1] = parse(getComputedStyle(e).backgroundColor);
      if (a > 0.99) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const faint = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement, style = getComputedStyle(element);
    if (!texts.currentNode.data.trim() || !element.checkVisibility() || ["SCRIPT",
    "STYLE"].includes(element.tagName)) continue;
    const [a, b] = [light(parse(style.color).slice(0, 3)), light(behind(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) faint.push(element.className + " " + texts.currentNode.data.trim()
      .slice(0, 30) + ": " + ratio.toFixed(2));
  }
  return faint;
})()"""
"""Text of less contrast than WCAG's AA asks of small text: 4.5."""

WIDE = """[...document.querySelectorAll("body *")]
  .filter((e) => e.checkVisibility())
  .filter((e) => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .filter((e) => !e.closest("svg, .wide, .xs, .strip"))
  .map((e) => e.tagName + "." + e.className)"""
"""What sticks out on the right; the last label under a chart may, by half its own width, within the page's
margin. A strip hides the labels for which it has no room.
"""

SMALL = """[...document.querySelectorAll("body *")]
  .filter((e) => e.checkVisibility() && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
  .filter((e) => !["SCRIPT", "STYLE"].includes(e.tagName) && parseFloat(getComputedStyle(e).fontSize) < 11.5)
  .map((e) => e.tagName + "." + e.className)"""


LINES = """(() => {
  const found = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  while (texts.nextNode()) {
    const node = texts.currentNode, element = node.parentElement;
    if (!node.data.trim() || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    if (!element.checkVisibility()) continue;
    range.selectNodeContents(node);
    for (const box of range.getClientRects())
      if (box.width > 1) found.push({ element, text: node.data.trim().slice(0, 30),
        left: box.left, top: box.top, right: box.right, bottom: box.bottom });
  }
  const clip = (e) => /hidden|clip|auto|scroll/.test(getComputedStyle(e).overflow);
  for (const line of found)
    for (let e = line.element; e && e !== document.body; e = e.parentElement)
      if (clip(e)) {
        const box = e.getBoundingClientRect();
        line.inside = Math.min(line.right, box.right) - Math.max(line.left, box.left) > 1 &&
          Math.min(line.bottom, box.bottom) - Math.max(line.top, box.top) > 1;
        line.whole = line.left >= box.left - 1 && line.right <= box.right + 1;
        if (!line.inside || !line.whole) break;
      }
  return found.filter((line) => line.inside !== false);
})()"""
"""The lines of text that are seen. A line outside of the box that clips it is not there, so not cut."""

CUT = f"{LINES}.filter((line) => line.whole === false).map((line) => line.text)"

OVERLAPS = f"""(() => {{
  const lines = {LINES}.sort((a, b) => a.top - b.top), found = [];
  lines.forEach((one, nth) => {{
    for (let k = nth + 1; k < lines.length && lines[k].top < one.bottom - 4; k++) {{
      const other = lines[k];
      if (Math.min(one.right, other.right) - Math.max(one.left, other.left) > 2)
        found.push(one.text + " / " + other.text);
    }}
  }});
  return found;
}})()"""
"""Pairs of lines of text that lie on each other, by more than 4 pixels in height and 2 in width."""


BROKEN = """(() => {
  const found = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  while (texts.nextNode()) {
    const node = texts.currentNode, element = node.parentElement;
    if (!element.checkVisibility() || element.closest("script, style, pre, code")) continue;
    for (const number of node.data.matchAll(/\\d[\\d.,:%]*/g)) {
      range.setStart(node, number.index);
      range.setEnd(node, number.index + number[0].length);
      const tops = [...range.getClientRects()].filter((box) => box.width > 0).map((box) => box.top);
      if (tops.length && Math.max(...tops) - Math.min(...tops) > 4) found.push(number[0]);
    }
  }
  return found;
})()"""
"""Numbers whose digits are on two lines."""


def assert_nothing_is_cut(page: Page) -> None:
    cut, overlaps = listed(page, CUT), listed(page, OVERLAPS)
    assert (broken := listed(page, BROKEN)) == [], f"numbers on two lines: {broken}"
    assert cut == [], f"cut: {cut}"
    assert overlaps == [], f"on each other: {overlaps}"


def assert_keeps_to_itself(page: Page) -> None:
    assert page.complaints == []
    assert [address[:80] for address in page.addresses if not address.startswith(("data:", "file:"))] == []
    assert sum(address.startswith("file:") for address in page.addresses) == 1


def assert_fits(page: Page) -> None:
    assert page.ask("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    assert listed(page, WIDE) == []


def assert_legible(page: Page) -> None:
    assert listed(page, FAINT) == []
    assert listed(page, SMALL) == []


def listed(page: Page, script: str) -> list[Any]:
    return list(page.ask(script))
