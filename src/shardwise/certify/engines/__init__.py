"""Adapters of engines, one file per engine: functions and constants that `certify.adapter.Adapter` names."""
