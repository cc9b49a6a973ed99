"""Reports of a plan: an HTML page, Markdown, a Perfetto trace and matplotlib figures.

`report_facts` is what a report is given to show, `report_text` makes tables and sentences of it, `charts` the data of
the charts, and `page` the HTML. `api/report.py` searches, simulates and writes the file. Nothing here imports torch.
"""
