"""Reports: renders the progress and profile of a run of `fit` as one HTML page.

Each worker appends lines of JSON to its own file beside the page. The chief reads the
files of all workers and renders the page, which is self-contained.

The callback `Report` (`callback`) opens a `session`, whose `recorder` records times at
almost no cost per step; `probes` measure communication and program starts after the
training. `journal` writes and reads the lines, `runs` turns them into records,
`diagnosis` and `figures` explain and draw them, and `page` renders the template.
`tensorboard` writes event files instead.

The only dependency on parameter servers is the session protocol in `worker`.
"""
