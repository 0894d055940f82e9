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
  .filter((e) => !e.closest("svg, .wide, .xs"))
  .map((e) => e.tagName + "." + e.className)"""
"""What sticks out on the right; the last label under a chart may, by half its own width, within the page's
margin.
"""

SMALL = """[...document.querySelectorAll("body *")]
  .filter((e) => e.checkVisibility() && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
  .filter((e) => !["SCRIPT", "STYLE"].includes(e.tagName) && parseFloat(getComputedStyle(e).fontSize) < 11.5)
  .map((e) => e.tagName + "." + e.className)"""


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
