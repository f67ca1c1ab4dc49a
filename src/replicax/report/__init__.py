"""Reports: renders the progress and profile of a run of `fit` as one HTML page.

Each worker appends lines of JSON to its own file beside the page; the chief renders the
page from all of them. The page is self-contained.
"""
