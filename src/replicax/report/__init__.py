"""Reports: renders the progress and profile of a run of `fit` as one HTML page.

Each worker appends lines of JSON to its own file beside the page; the chief renders the
page from all of them. The page is self-contained.

One run. The callback `Report` (`callback`) opens a `session`, whose `recorder` notes
times at almost no cost for a step; `probes` measure single parts of a step at the end.
`journal` writes the lines and reads them, `runs` makes records of them, `diagnosis` and
`figures` say and draw what they mean, and `page` renders the template. `serving` shows
the page of a running training; `tensorboard` writes event files instead.

It uses strategies, and nothing of parameter servers but the protocol of a session
(`worker`).
"""
