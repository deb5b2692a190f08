"""Files, devices, results and statistics that every package uses."""
