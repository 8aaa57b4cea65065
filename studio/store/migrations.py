"""The numbered steps that build the studio's database. Append only: a released step never changes.

This folder holds all SQL of the project.
"""

from __future__ import annotations

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE models (
            fingerprint VARCHAR PRIMARY KEY, name VARCHAR NOT NULL, facts JSON NOT NULL, seen_at TIMESTAMP NOT NULL)""",
        """CREATE TABLE prompts (
            sha256 VARCHAR PRIMARY KEY, name VARCHAR NOT NULL, kind VARCHAR NOT NULL, text VARCHAR NOT NULL,
            created_at TIMESTAMP NOT NULL)""",
        """CREATE TABLE runs (
            id VARCHAR PRIMARY KEY, model VARCHAR NOT NULL, fingerprint VARCHAR NOT NULL,
            prompt_sha256 VARCHAR NOT NULL, tokens INTEGER NOT NULL, chat_template BOOLEAN NOT NULL,
            device VARCHAR NOT NULL, dtype VARCHAR NOT NULL, impl VARCHAR NOT NULL, tiles VARCHAR NOT NULL,
            estimator JSON NOT NULL, capture_ms DOUBLE NOT NULL,
            measure_ms DOUBLE NOT NULL, versions JSON NOT NULL, created_at TIMESTAMP NOT NULL)""",
        """CREATE TABLE head_measurements (
            run_id VARCHAR NOT NULL, context VARCHAR NOT NULL, layer INTEGER NOT NULL, head INTEGER NOT NULL,
            pattern JSON NOT NULL, missed_mass_mean DOUBLE, missed_mass_worst DOUBLE, missed_mass_p99 DOUBLE,
            output_error DOUBLE, requested_density DOUBLE, computed_density DOUBLE, body JSON NOT NULL,
            measured_at TIMESTAMP NOT NULL)""",
        """CREATE TABLE configs (
            id VARCHAR PRIMARY KEY, number INTEGER NOT NULL, name VARCHAR NOT NULL, parent_id VARCHAR, run_id VARCHAR,
            note VARCHAR NOT NULL, tiles VARCHAR NOT NULL, estimator JSON NOT NULL, model JSON NOT NULL,
            provenance JSON NOT NULL, audit JSON NOT NULL, created_at TIMESTAMP NOT NULL)""",
        """CREATE TABLE config_heads (
            config_id VARCHAR NOT NULL, layer INTEGER NOT NULL, head INTEGER NOT NULL, pattern JSON NOT NULL,
            evidence JSON, PRIMARY KEY (config_id, layer, head))""",
    ),
    (
        """CREATE TABLE drafts (
            draft_id VARCHAR NOT NULL, sequence INTEGER NOT NULL, body JSON NOT NULL, saved_at TIMESTAMP NOT NULL,
            PRIMARY KEY (draft_id, sequence))""",
        """CREATE TABLE latencies (
            run_id VARCHAR NOT NULL, config_id VARCHAR, kind VARCHAR NOT NULL, tokens INTEGER NOT NULL,
            body JSON NOT NULL, measured_at TIMESTAMP NOT NULL)""",
        """CREATE TABLE searches (
            id VARCHAR PRIMARY KEY, model VARCHAR NOT NULL, config_id VARCHAR, settings JSON NOT NULL,
            summary JSON NOT NULL, created_at TIMESTAMP NOT NULL)""",
    ),
    (
        """CREATE TABLE search_measurements (
            search_id VARCHAR NOT NULL, prompt_sha256 VARCHAR NOT NULL, layer INTEGER NOT NULL, head INTEGER NOT NULL,
            candidate INTEGER NOT NULL, missed_mass_mean DOUBLE, missed_mass_worst DOUBLE,
            missed_mass_worst_row INTEGER, missed_mass_p99 DOUBLE, missed_mass_start DOUBLE, missed_mass_middle DOUBLE,
            missed_mass_end DOUBLE, output_error DOUBLE, output_cosine DOUBLE, requested_pairs BIGINT,
            computed_pairs BIGINT, tile_cells BIGINT)""",
    ),
    (
        # A draft was kept whole at each edit; now its start is kept once and each edit is a row.
        """CREATE TABLE draft_edits (
            draft_id VARCHAR NOT NULL, position INTEGER NOT NULL, sequence INTEGER NOT NULL, body JSON NOT NULL,
            saved_at TIMESTAMP NOT NULL)""",
        """DELETE FROM drafts USING
            (SELECT draft_id, max(sequence) AS last FROM drafts GROUP BY draft_id) AS newest
            WHERE drafts.draft_id = newest.draft_id AND drafts.sequence < newest.last""",
    ),
)

VERSION = len(MIGRATIONS)
