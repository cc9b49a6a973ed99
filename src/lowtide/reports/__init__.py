"""Reports of a plan: an HTML page, Markdown, a Perfetto trace and matplotlib figures.

`report_facts` gathers what a report shows, `report_text` makes tables and sentences of it, `charts` the data of the
charts, and `page` writes the file. Nothing here imports torch.
"""
