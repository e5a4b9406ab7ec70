"""The report's HTML page, read back by its elements, and text that would break out of it."""

from html.parser import HTMLParser

HOSTILE = "<img src=x onerror=alert(1)>|`a`\"'&amp;</td></table><script>alert(2)</script>\u202e[x](http://e.org)"
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """The page's elements: tags must nest, and tables become {caption: rows of cell texts}; where a
    caption returns in another section, also {(heading, caption): rows}.
    """

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.ids, self.links, self.text = [], [], [], [], []
        self.tables, self.rows, self.cell, self.caption, self.heading = {}, [], None, "", ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.tags.append((tag, named))
        self.ids += [named["id"]] if "id" in named else []
        self.links += [named["href"]] if "href" in named else []
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.rows = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th", "caption", "h2"):
            self.cell = ""

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> inside {self.open}"
        self.open.pop()
        if tag in ("td", "th"):
            self.rows[-1].append(self.cell)
        elif tag == "caption":
            self.caption = self.cell
        elif tag == "h2":
            self.heading = self.cell
        elif tag == "table":
            self.tables[self.caption] = self.tables[self.heading, self.caption] = self.rows

    def handle_data(self, data):
        self.text.append(data)
        if self.cell is not None:
            self.cell += data
