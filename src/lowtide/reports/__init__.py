"""Reports of a plan: an HTML page, Markdown, a Perfetto trace and matplotlib figures.

`report_text` simulates the step with and without the plan and makes tables and sentences of it, `charts` the data of
the charts, and `page` the HTML file. `api.report` calls them. Nothing here imports torch.
"""
