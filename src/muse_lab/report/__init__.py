"""Rendering of reports. Their contents are decided beside each measurement, in files named `*_report.py`.

`tree.py` describes a report once; `html.py` and `markdown.py` render it, `plots.py` draws its pictures, and `files.py`
writes it beside the results.
"""
