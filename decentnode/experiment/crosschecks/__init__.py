"""Checks that need several sections of an experiment at once: one small function per rule, listed in `CHECKS`.

Each check makes the components that it needs, which is cheap (it opens files and reads labels and two samples, but
opens no socket), and yields problems with the locations of both values. A component that cannot be made is reported
once, by the check of its own section.
"""

from __future__ import annotations

from decentnode.experiment.crosschecks.asynchronous import (
    asynchronous_keys_are_read,
    rounds_need_nobody,
    weights_are_read,
)
from decentnode.experiment.crosschecks.communication import (
    edges_have_their_ways,
    generations_can_be_had,
    hidden_machines_can_be_reached,
    inproc_is_one_machine,
    keys_are_there,
    nodes_can_be_stepped,
    time_outs_follow_each_other,
)
from decentnode.experiment.crosschecks.epidemic import sampler_suits_the_run, what_comes_can_be_averaged
from decentnode.experiment.crosschecks.faults import (
    faults_are_of_the_run,
    faults_can_be_planned,
    faults_can_come_about,
)
from decentnode.experiment.crosschecks.federated import (
    clients_suit_the_servers,
    models_suit_a_server,
    steps_suit_control_variates,
)
from decentnode.experiment.crosschecks.graph import (
    fragment_graphs_can_be_made,
    graph_can_be_made,
    machines_have_addresses,
    mapping_can_be_made,
    mapping_holds_the_graph,
    newcomers_can_be_admitted,
)
from decentnode.experiment.crosschecks.model import model_can_be_trained
from decentnode.experiment.crosschecks.numbers import numbers_are_of_the_run
from decentnode.experiment.crosschecks.parts import Check
from decentnode.experiment.crosschecks.run import profile_is_of_the_run, trackers_are_told_apart, virtual_time_is_told
from decentnode.experiment.crosschecks.sharing import (
    corrections_are_made,
    dumps_are_of_the_run,
    everybody_hears_of_everybody,
    gradients_reach_the_rule,
    groups_suit_the_graph,
    losses_can_be_borne,
    sharing_is_a_rule,
    sharing_suits_the_graph,
    step_brings_nodes_together,
    weights_of_a_quorum_suit_the_rule,
)
from decentnode.experiment.crosschecks.training import (
    batches_suit_the_model,
    best_is_a_metric,
    data_can_be_opened,
    every_node_gets_data,
    figures_fit_into_a_message,
    images_can_be_augmented,
    orphans_can_be_adopted,
    own_tests_suit_the_sampling,
    patterns_match_the_model,
    samples_are_left,
    schedule_lasts,
    task_suits_the_data,
)

CHECKS: tuple[Check, ...] = (
    rounds_need_nobody,
    asynchronous_keys_are_read,
    weights_are_read,
    graph_can_be_made,
    fragment_graphs_can_be_made,
    mapping_can_be_made,
    machines_have_addresses,
    mapping_holds_the_graph,
    data_can_be_opened,
    every_node_gets_data,
    samples_are_left,
    images_can_be_augmented,
    task_suits_the_data,
    model_can_be_trained,
    patterns_match_the_model,
    batches_suit_the_model,
    own_tests_suit_the_sampling,
    schedule_lasts,
    orphans_can_be_adopted,
    best_is_a_metric,
    figures_fit_into_a_message,
    sharing_is_a_rule,
    gradients_reach_the_rule,
    corrections_are_made,
    sharing_suits_the_graph,
    groups_suit_the_graph,
    everybody_hears_of_everybody,
    losses_can_be_borne,
    step_brings_nodes_together,
    weights_of_a_quorum_suit_the_rule,
    dumps_are_of_the_run,
    clients_suit_the_servers,
    models_suit_a_server,
    steps_suit_control_variates,
    virtual_time_is_told,
    inproc_is_one_machine,
    nodes_can_be_stepped,
    numbers_are_of_the_run,
    edges_have_their_ways,
    hidden_machines_can_be_reached,
    keys_are_there,
    generations_can_be_had,
    time_outs_follow_each_other,
    newcomers_can_be_admitted,
    faults_are_of_the_run,
    faults_can_be_planned,
    faults_can_come_about,
    what_comes_can_be_averaged,
    sampler_suits_the_run,
    profile_is_of_the_run,
    trackers_are_told_apart,
)
