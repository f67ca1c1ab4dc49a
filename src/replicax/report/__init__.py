"""Reports: what a run of `fit` did and where its time went, as one page for people.

Each worker appends lines of JSON to a file of its own beside the page; the chief makes
the page of all of them. It is one file that loads nothing.
"""
