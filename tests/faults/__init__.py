"""Random faults over random layouts: `python -m faults`, or `make faults`.

`draw` draws faults and layouts by a seed, `trial` runs a training through one and checks what must hold, `inject` has
the faults of training and `serving` those of a server. `report` is the table.
"""
