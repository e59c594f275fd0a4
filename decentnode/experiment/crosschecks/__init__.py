"""Checks that need several sections of an experiment at once: one small function per rule, listed in `CHECKS`.

Each check makes the components that it needs, which is cheap (it opens files and reads labels and two samples, but
opens no socket), and yields problems with the locations of both values. A component that cannot be made is reported
once, by the check of its own section.
"""

from __future__ import annotations

from decentnode.experiment.crosschecks.asynchronous import (
    check_asynchronous_keys,
    check_asynchronous_schedule,
    check_weights_are_used,
)
from decentnode.experiment.crosschecks.attack import (
    check_attack,
    check_attack_class,
    check_attack_is_of_use,
    check_attackers,
)
from decentnode.experiment.crosschecks.communication import (
    check_edges_and_cliques,
    check_generations,
    check_inproc,
    check_key_files,
    check_nat,
    check_nodes_per_process,
    check_timeouts,
)
from decentnode.experiment.crosschecks.epidemic import check_epidemic_rule, check_sampler
from decentnode.experiment.crosschecks.faults import (
    check_fault_plan,
    check_fault_targets,
    check_faults_are_possible,
)
from decentnode.experiment.crosschecks.federated import (
    check_clients,
    check_control_variates,
    check_model_fits_server,
)
from decentnode.experiment.crosschecks.graph import (
    check_fragment_graphs,
    check_graph,
    check_machine_addresses,
    check_mapping,
    check_mapping_fits_graph,
    check_newcomers,
    check_weights_keep_exactness,
)
from decentnode.experiment.crosschecks.model import check_model
from decentnode.experiment.crosschecks.numbers import check_number_ranges
from decentnode.experiment.crosschecks.parts import Check
from decentnode.experiment.crosschecks.privacy import check_membership, check_privacy, check_privacy_of_payloads
from decentnode.experiment.crosschecks.run import check_profile, check_trackers, check_virtual_time
from decentnode.experiment.crosschecks.sharing import (
    check_direction_hook,
    check_dump_nodes,
    check_elementwise_payload,
    check_equal_rates,
    check_groups,
    check_information_spreads,
    check_missing_payloads,
    check_plans,
    check_private_rule,
    check_quorum_weights,
    check_sharing_class,
    check_sharing_fits_graph,
    check_sharing_libraries,
    check_step_hooks,
    check_step_size,
    check_training_rounds,
)
from decentnode.experiment.crosschecks.training import (
    check_augmentation,
    check_batch_sizes,
    check_best_metric,
    check_data,
    check_learning_rate_schedule,
    check_number_of_metrics,
    check_orphans,
    check_own_test_samples,
    check_parameter_patterns,
    check_partition,
    check_remaining_samples,
    check_task,
)

CHECKS: tuple[Check, ...] = (
    check_asynchronous_schedule,
    check_asynchronous_keys,
    check_weights_are_used,
    check_graph,
    check_weights_keep_exactness,
    check_fragment_graphs,
    check_mapping,
    check_machine_addresses,
    check_mapping_fits_graph,
    check_data,
    check_partition,
    check_remaining_samples,
    check_augmentation,
    check_task,
    check_model,
    check_parameter_patterns,
    check_batch_sizes,
    check_own_test_samples,
    check_learning_rate_schedule,
    check_orphans,
    check_best_metric,
    check_number_of_metrics,
    check_privacy,
    check_privacy_of_payloads,
    check_membership,
    check_sharing_class,
    check_sharing_libraries,
    check_direction_hook,
    check_step_hooks,
    check_training_rounds,
    check_elementwise_payload,
    check_sharing_fits_graph,
    check_groups,
    check_plans,
    check_information_spreads,
    check_missing_payloads,
    check_private_rule,
    check_step_size,
    check_quorum_weights,
    check_dump_nodes,
    check_equal_rates,
    check_attack_class,
    check_attackers,
    check_attack,
    check_attack_is_of_use,
    check_clients,
    check_model_fits_server,
    check_control_variates,
    check_virtual_time,
    check_inproc,
    check_nodes_per_process,
    check_number_ranges,
    check_edges_and_cliques,
    check_nat,
    check_key_files,
    check_generations,
    check_timeouts,
    check_newcomers,
    check_fault_targets,
    check_fault_plan,
    check_faults_are_possible,
    check_epidemic_rule,
    check_sampler,
    check_profile,
    check_trackers,
)
