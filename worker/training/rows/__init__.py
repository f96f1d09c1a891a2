"""From the files or hub data set that a job names to usable texts, each row once.

Read origin and sources, then row, reading and its formats (json_lines, csv_rows with csv_records, parquet_rows), then
text, row_counts and row_filter.
"""
