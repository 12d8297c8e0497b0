// The sync op: from expert ids to slot ids, in one go or stage by stage.

#include <algorithm>
#include <cstring>
#include <numeric>

#include "ggml.h"
#include "spare-slots.h"
#include "stream.h"

namespace lh {

static int32_t & id_at(const ggml_tensor * ids, int64_t i0, int64_t i1) {
    return *reinterpret_cast<int32_t *>(static_cast<char *>(ids->data) + i1 * ids->nb[1] + i0 * ids->nb[0]);
}

static error layer_error(const stream_layer & layer, const std::string & what) {
    return error(LH_STATUS_INTERNAL, "layer " + std::to_string(layer.layer) + ": " + what);
}

} // namespace lh

// Fills needed with the distinct ids in the order of their last rows, and missing with those that no slot holds.
void lh_stream::collect(lh::stream_layer & layer, const ggml_tensor * ids) {
    n_collected++;
    layer.needed.clear();
    layer.missing.clear();
    for (int64_t i1 = ids->ne[1] - 1; i1 >= 0; i1--) {
        for (int64_t i0 = ids->ne[0] - 1; i0 >= 0; i0--) {
            const int32_t expert = lh::id_at(ids, i0, i1);
            if (expert < 0 || expert >= layer.n_expert) {
                throw lh::layer_error(layer, "the router chose expert " + std::to_string(expert));
            }
            if (layer.seen[expert] == n_collected) {
                continue;
            }
            layer.seen[expert] = n_collected;
            layer.needed.push_back(expert);
        }
    }
    std::reverse(layer.needed.begin(), layer.needed.end());
    for (int32_t expert : layer.needed) {
        layer.table.n_needed[expert] += phase == LH_PHASE_DECODE ? 1 : 0;
        const int32_t slot      = layer.table.slot_of[expert];
        layer.seen_slot[expert] = slot;
        if (slot < 0) {
            layer.missing.push_back(expert);
        } else if (slot >= layer.n_slots || layer.table.expert_of[slot] != expert) {
            throw lh::layer_error(layer, "the slot table contradicts itself");
        }
    }
    live->counters[phase].n_hits += static_cast<int64_t>(layer.needed.size() - layer.missing.size());
    live->counters[phase].n_misses += static_cast<int64_t>(layer.missing.size());
}

static lh_request request_of(const lh::stream_layer & layer) {
    return {
        layer.index,
        layer.plan.n_stages,
        static_cast<int32_t>(layer.needed.size()),
        static_cast<int32_t>(layer.missing.size()),
        layer.needed.data(),
        layer.missing.data(),
    };
}

void lh_stream::request_plan(lh::stream_layer & layer) {
    const lh_request request = request_of(layer);
    const lh_status  status  = on_plan(user_data, &request);
    if (status != LH_STATUS_OK) {
        throw lh::error(status, "layer " + std::to_string(layer.layer) + ": no plan");
    }
    if (!layer.plan.is_active) {
        throw lh::layer_error(layer, "nothing was loaded, and no stages were set");
    }
}

// Gives what is missing the slots that were named for it, so that reading begins before anything is planned; false: they do not
// suffice, and the slots are what they were. Either way they are nominees no longer.
bool lh_stream::take_nominees(lh::stream_layer & layer) {
    const lh_slot_table & table = layer.table;
    layer.taken.clear();
    for (const lh::nominee & nominee : layer.nominees) {
        if (table.expert_of[nominee.slot] != nominee.expert || layer.taken.size() == layer.missing.size()) {
            break;
        }
        if (nominee.expert < 0 || layer.seen[nominee.expert] != n_collected) {
            layer.taken.push_back(nominee.slot);
        }
    }
    layer.nominees.clear();
    if (layer.plan.n_stages > 2 || layer.taken.size() < layer.missing.size()) {
        return false;
    }
    layer.is_untold = true;
    std::vector<lh_load> loads;
    for (size_t i = 0; i < layer.taken.size(); i++) {
        const int32_t slot = layer.taken[i];
        if (table.expert_of[slot] >= 0) {
            table.slot_of[table.expert_of[slot]] = -1;
            table.expert_of[slot]                = -1;
            live->counters[phase].n_evictions++;
        }
        loads.push_back({ layer.missing[i], slot, -1, false, -1 });
    }
    load(layer.index, loads.data(), static_cast<int32_t>(loads.size()));
    return true;
}

void lh_stream::report_begun(lh::stream_layer & layer, bool is_taken) {
    const lh_request request = request_of(layer);
    const lh_status  status  = on_begun(user_data, &request, is_taken ? layer.taken.data() : nullptr);
    if (status != LH_STATUS_OK) {
        throw lh::error(status, "layer " + std::to_string(layer.layer) + ": what is being read is not known");
    }
    layer.is_untold = false;
}

// Has what a layer misses read. What can be planned later is planned once reads are under way.
void lh_stream::begin_loads(lh::stream_layer & layer) {
    crew.hold();
    const int64_t start_us = lh::now_us();
    const bool    is_taken = take_nominees(layer);
    if (!is_taken) {
        request_plan(layer);
    }
    const int64_t planned_us = lh::now_us();
    submit_ahead(layer);
    const int64_t submitted_us = lh::now_us();
    if (layer.plan.n_stages <= 2) {
        settle_completed();
        report_begun(layer, is_taken);
    }
    const int64_t end_us = lh::now_us();
    live->counters[phase].plan_us += planned_us - start_us + end_us - submitted_us;
    live->counters[phase].wait_us += end_us - start_us;
}

void lh_stream::stamp(lh::stream_layer & layer) {
    for (int32_t expert : layer.needed) {
        const int32_t slot = layer.table.slot_of[expert];
        if (slot >= 0) {
            layer.table.last_use[slot] = ++clock;
            layer.table.n_uses[slot]++;
            const auto used = std::find_if(layer.nominees.begin(), layer.nominees.end(),
                                           [&](const lh::nominee & nominee) { return nominee.slot == slot; });
            layer.nominees.erase(used, layer.nominees.end());
        }
    }
}

// Lets the layer that comes next fill its free slots with what it will surely want, where many rows are routed.
void lh_stream::ask_ahead(const lh::stream_layer & layer, int64_t n_selected) {
    const size_t next = static_cast<size_t>(layer.index) + 1;
    // the last layer computes only the rows whose output is wanted, so what it wants is not known from the others
    if (next + 1 >= layers.size() || n_selected <= layers[next].n_expert || !layers[next].is_quiet ||
        layers[next].is_untold) {
        return;
    }
    const int32_t * expert_of = layers[next].table.expert_of;
    if (std::find(expert_of, expert_of + layers[next].n_slots, -1) != expert_of + layers[next].n_slots) {
        const lh_status status = on_ahead(user_data, layers[next].index, n_selected);
        if (status != LH_STATUS_OK) {
            throw lh::error(status, "layer " + std::to_string(layers[next].layer) + ": nothing loaded ahead");
        }
    }
}

void lh_stream::await(lh::read_batch & batch) {
    crew.hold();
    const int64_t start_us  = lh::now_us();
    const int64_t worked_us = crew.worked_us;
    pool->wait(batch, &crew);
    const int64_t repack_us = crew.worked_us - worked_us;
    live->counters[phase].repack_us += repack_us;
    live->counters[phase].read_us += lh::now_us() - start_us - repack_us;
}

// Waits for what was read ahead.
void lh_stream::settle_ahead(lh::stream_layer & layer) {
    if (layer.ahead) {
        const int64_t start_us = lh::now_us();
        await(*layer.ahead); // what fails here is dropped at the end of the ubatch
        layer.ahead.reset();
        for (const lh_load & load : layer.ahead_loads) {
            layer.enter_tier(load);
        }
        layer.is_untold = true;
        report_complete(layer);
        layer.is_untold = false;
        live->counters[phase].wait_us += lh::now_us() - start_us;
    }
}

void lh_stream::report_complete(const lh::stream_layer & layer) {
    const lh_status status = on_complete(user_data, layer.index, true);
    if (status != LH_STATUS_OK) {
        throw lh::error(status, "layer " + std::to_string(layer.layer) + ": what was read is not known");
    }
}

void lh_stream::sync(const lh::sync_point & point, ggml_tensor * dst, const ggml_tensor * ids) {
    lh::stream_layer & layer      = *point.layer;
    lh::stage_plan &   plan       = layer.plan;
    const int64_t      n_selected = ids->ne[0] * ids->ne[1];
    if (!plan.is_active) {
        begin_layer(layer, ids);
    }
    if (point.stage != plan.n_synced_of[point.tensor] || point.stage >= plan.n_stages) {
        throw lh::layer_error(layer, "stage " + std::to_string(point.stage) + " is out of turn");
    }
    if (point.stage == 0) { // remember the order of the tensors, which is that of the reads
        const auto it = std::find(layer.order.begin(), layer.order.end(), point.tensor);
        std::rotate(layer.order.begin() + plan.n_tensors_begun, it, it + 1);
        plan.n_tensors_begun++;
    }
    if (plan.n_stages == 1 && lh::is_on_device(layer.tensors[point.tensor].kind)) {
        // these ids serve all tensors on devices
        for (int32_t tensor : layer.order) {
            if (lh::is_on_device(layer.tensors[tensor].kind) && tensor != point.tensor) {
                begin_stage(layer, tensor, point.stage);
            }
        }
    }
    begin_stage(layer, point.tensor, point.stage);
    if (!plan.has_asked_ahead && (!plan.has_loads || submit_ahead(layer))) {
        plan.has_asked_ahead = true;
        ask_ahead(layer, n_selected);
    }
    fill_ids(point, dst, ids);
    if (plan.n_synced == plan.n_stages * static_cast<int32_t>(layer.order.size())) {
        complete(layer);
    }
}

// Has a tensor ready for a stage.
void lh_stream::begin_stage(lh::stream_layer & layer, int32_t tensor, int32_t stage) {
    layer.plan.n_synced_of[tensor]++;
    layer.plan.n_synced++;
    if (layer.plan.has_loads) {
        await_stage(layer, tensor, stage);
    }
}

// All slots, those that a stage does not compute from before the others.
static std::vector<int32_t> spare_slots(const lh::stream_layer & layer, int32_t stage) {
    std::vector<bool> is_used(layer.n_slots, false);
    for (int32_t expert : layer.needed) {
        if (layer.plan.places[expert].stage == stage) {
            is_used[layer.plan.places[expert].slot] = true;
        }
    }
    std::vector<int32_t> slots(layer.n_slots);
    std::iota(slots.begin(), slots.end(), 0);
    std::stable_partition(slots.begin(), slots.end(), [&](int32_t slot) { return !is_used[slot]; });
    return slots;
}

void lh_stream::fill_ids(const lh::sync_point & point, ggml_tensor * dst, const ggml_tensor * ids) const {
    const lh::stream_layer & layer     = *point.layer;
    const bool               is_copy   = dst->ne[2] > 1;
    const bool is_skipping             = !is_copy || ids->ne[1] >= layer.tensors[point.tensor].traits.n_tokens_skipping;
    const std::vector<int32_t> spare   = is_skipping ? std::vector<int32_t>() : spare_slots(layer, point.stage);
    const int64_t              n_used  = ids->ne[0];
    const int32_t              nowhere = static_cast<int32_t>(n_used * ids->ne[1]);
    int32_t *                  slots   = static_cast<int32_t *>(dst->data);
    int32_t *                  rows    = slots + nowhere; // with is_copy
    int32_t                    row     = 0;
    for (int64_t i1 = 0; i1 < ids->ne[1]; i1++) {
        for (int64_t i0 = 0; i0 < n_used; i0++, row++) {
            const lh::placement & place = layer.plan.places[lh::id_at(ids, i0, i1)];
            const bool            is_in = place.stage == point.stage;
            slots[row]                  = is_in ? place.slot : -1;
            if (is_copy) {
                rows[row] = is_in ? row : nowhere;
            }
        }
        if (!is_skipping) {
            lh::fill_spare(slots + i1 * n_used, n_used, spare);
        }
    }
}

void lh_stream::fill_harmless(const lh::sync_point & point, ggml_tensor * dst) const {
    const bool    is_on_device = lh::is_on_device(point.layer->tensors[point.tensor].kind);
    const int64_t n_rows       = dst->ne[0] * dst->ne[1];
    int32_t *     data         = static_cast<int32_t *>(dst->data);
    for (int64_t row = 0; row < n_rows;
         row++) { // no rows where kernels skip them, or any slots, distinct ones for a token
        data[row] = is_on_device ? static_cast<int32_t>(row % dst->ne[0] % point.layer->n_slots) : -1;
    }
    if (dst->ne[2] > 1) {
        std::fill_n(data + n_rows, n_rows, static_cast<int32_t>(n_rows));
    }
}

// The first sync of a layer: finds out what is needed and has it planned, unless all of it is there.
void lh_stream::begin_layer(lh::stream_layer & layer, const ggml_tensor * ids) {
    if (layer.is_untold) { // a signal's exception struck where it was to be told
        const lh_status status = on_complete(user_data, layer.index, false);
        if (status != LH_STATUS_OK) {
            throw lh::error(status, "layer " + std::to_string(layer.layer) + ": what its slots hold is not known");
        }
        layer.is_untold = false;
    }
    settle_ahead(layer);
    collect(layer, ids);
    if (trace.is_open()) {
        trace.add(layer, ids, phase);
    }
    layer.plan.n_stages = n_stages_for(layer, ids->ne[0] * ids->ne[1]);
    if (!layer.missing.empty()) {
        begin_loads(layer);
        return;
    }
    begin_plan(layer);
    for (int32_t expert : layer.needed) {
        layer.plan.places[expert] = { 0, layer.table.slot_of[expert] };
    }
}

void lh_stream::begin_plan(lh::stream_layer & layer) {
    lh::stage_plan & plan = layer.plan;
    plan.is_active        = true;
    plan.has_loads        = false;
    plan.has_asked_ahead  = false;
    plan.n_synced         = 0;
    plan.n_tensors_begun  = 0;
    plan.n_synced_of.assign(layer.tensors.size(), 0);
}

void lh_stream::await_stage(lh::stream_layer & layer, int32_t tensor, int32_t stage) {
    lh::stage_plan & plan = layer.plan;
    if (plan.load_first[stage] == plan.load_first[stage + 1]) {
        return;
    }
    const int64_t start_us = lh::now_us();
    if (!plan.reads[tensor][stage].is_submitted) {
        submit_stage(layer, tensor, stage);
    }
    await(plan.reads[tensor][stage].batch);
    live->counters[phase].wait_us += lh::now_us() - start_us;
}

// A wrong place would be a wrong token, so a plan is believed only as far as it can be checked.
void lh_stream::check_places(const lh::stream_layer & layer, const lh_place * places, int32_t n_places) const {
    std::vector<bool> is_placed(layer.n_expert, false);
    std::vector<bool> is_taken(layer.n_tier, false);
    for (int32_t i = 0; i < n_places; i++) {
        const lh_place & place = places[i];
        if (place.expert < 0 || place.expert >= layer.n_expert || place.slot < 0 || place.slot >= layer.n_slots ||
            place.stage < 0 || place.stage >= layer.plan.n_stages) {
            throw lh::layer_error(layer, "a place is out of range");
        }
        if (place.is_load && layer.table.slot_of[place.expert] >= 0) {
            throw lh::layer_error(layer, "expert " + std::to_string(place.expert) + " is loaded twice");
        }
        if (!place.is_load && layer.seen_slot[place.expert] != place.slot) {
            throw lh::layer_error(layer, "expert " + std::to_string(place.expert) + " is not in its slot");
        }
        if (place.is_load) {
            check_tier(layer, lh::load_of(place), is_taken);
        }
        if (layer.seen[place.expert] != n_collected || is_placed[place.expert]) {
            throw lh::layer_error(layer, "expert " + std::to_string(place.expert) + " is placed twice, or not needed");
        }
        is_placed[place.expert] = true;
    }
    if (n_places != static_cast<int32_t>(layer.needed.size())) {
        throw lh::layer_error(layer, "not every needed expert has a place");
    }
}

// Sets what each stage has to wait for before it can be read; throws when a slot would be overwritten before its use.
void lh_stream::find_last_users(lh::stream_layer & layer, std::vector<lh_place> places) const {
    std::sort(places.begin(), places.end(), [](const lh_place & a, const lh_place & b) {
        return a.slot != b.slot ? a.slot < b.slot : a.stage < b.stage;
    });
    layer.plan.last_user.assign(layer.plan.n_stages, -1);
    for (size_t i = 1; i < places.size(); i++) {
        const lh_place & before = places[i - 1];
        const lh_place & place  = places[i];
        if (before.slot != place.slot) {
            continue;
        }
        if (before.stage == place.stage || !place.is_load) {
            throw lh::layer_error(layer, "slot " + std::to_string(place.slot) + " is used twice in a stage, or lost");
        }
        layer.plan.last_user[place.stage] = std::max(layer.plan.last_user[place.stage], before.stage);
    }
}

void lh_stream::set_stages(int32_t layer_index, const lh_place * places, int32_t n_places) {
    lh::stream_layer & layer = layer_at(layer_index);
    lh::stage_plan &   plan  = layer.plan;
    if (phase == LH_N_PHASES || plan.is_active) {
        throw lh::error(LH_STATUS_STATE, "stages are set once, when a plan is asked for");
    }
    check_places(layer, places, n_places);
    find_last_users(layer, std::vector<lh_place>(places, places + n_places));

    plan.loads.clear();
    plan.load_first.assign(plan.n_stages + 1, 0);
    for (int32_t i = 0; i < n_places; i++) {
        plan.places[places[i].expert] = { places[i].stage, places[i].slot };
        if (places[i].is_load) {
            plan.loads.push_back(places[i]);
            plan.load_first[places[i].stage + 1]++;
            live->counters[phase].n_tier_hits += places[i].is_in_tier ? 1 : 0;
        }
    }
    std::stable_sort(plan.loads.begin(), plan.loads.end(),
                     [](const lh_place & a, const lh_place & b) { return a.stage < b.stage; });
    for (int32_t stage = 0; stage < plan.n_stages; stage++) {
        plan.load_first[stage + 1] += plan.load_first[stage];
    }
    begin_plan(layer);
    plan.has_loads = true;
    plan.reads.clear();
    plan.reads.resize(layer.tensors.size());
    for (auto & reads : plan.reads) {
        reads.resize(plan.n_stages);
    }
}

void lh_stream::load(int32_t layer_index, const lh_load * loads, int32_t n_loads) {
    const lh::stream_layer & layer = layer_at(layer_index);
    std::vector<lh_place>    places;
    for (int32_t expert : layer.needed) {
        if (layer.table.slot_of[expert] >= 0) {
            places.push_back({ 0, expert, layer.table.slot_of[expert], false, -1, false, -1 });
        }
    }
    for (int32_t i = 0; i < n_loads; i++) {
        const lh_load & load = loads[i];
        places.push_back(
            { layer.plan.n_stages - 1, load.expert, load.slot, true, load.tier_slot, load.is_in_tier, load.swap_slot });
    }
    set_stages(layer_index, places.data(), static_cast<int32_t>(places.size()));
}

void lh_stream::nominate(int32_t layer_index, const int32_t * slots, int32_t n_slots) {
    lh::stream_layer &       layer = layer_at(layer_index);
    std::vector<lh::nominee> nominees;
    std::vector<bool>        is_named(layer.n_slots, false);
    for (int32_t i = 0; i < n_slots; i++) {
        if (slots[i] < 0 || slots[i] >= layer.n_slots || is_named[slots[i]]) {
            throw lh::error(LH_STATUS_INVALID_ARGUMENT, "layer " + std::to_string(layer.layer) + ": no slot " +
                                                            std::to_string(slots[i]) + ", or it is nominated twice");
        }
        is_named[slots[i]] = true;
        nominees.push_back({ slots[i], layer.table.expert_of[slots[i]] });
    }
    if (layer.n_tier > 0 && n_slots > 0) {
        throw lh::error(LH_STATUS_INVALID_ARGUMENT, "layer " + std::to_string(layer.layer) +
                                                        ": what is read goes to the tier as well, which takes a plan");
    }
    layer.nominees = std::move(nominees);
}

void lh_stream::submit_stage(lh::stream_layer & layer, int32_t tensor, int32_t stage) {
    lh::stage_plan &            plan  = layer.plan;
    lh::stage_reads &           reads = plan.reads[tensor][stage];
    std::vector<lh::read_chunk> chunks;
    for (size_t i = plan.load_first[stage]; i < plan.load_first[stage + 1]; i++) {
        add_load(layer, layer.tensors[tensor], lh::load_of(plan.loads[i]), reads.batch, chunks);
    }
    reads.is_submitted = true;
    pool->submit(std::move(chunks), reads.batch);
}

// Submits whatever can be read now, in the order of use: a stage of a tensor once the last one that uses its slots has been
// computed, which the sync of the one after that says. Returns whether all has been submitted.
bool lh_stream::submit_ahead(lh::stream_layer & layer) {
    lh::stage_plan & plan   = layer.plan;
    bool             is_all = true;
    if (!layer.is_quiet) { // each stage is read when its turn has come, while nothing is computed
        return false;
    }
    for (int32_t tensor : layer.order) {
        int32_t stage = 0;
        for (; stage < plan.n_stages &&
               (plan.last_user[stage] < 0 || plan.last_user[stage] + 2 <= plan.n_synced_of[tensor]);
             stage++) {
            if (!plan.reads[tensor][stage].is_submitted) {
                submit_stage(layer, tensor, stage);
            }
        }
        is_all = is_all && stage == plan.n_stages;
    }
    return is_all;
}

// What a layer has read is told while a later one is being read, or at the end of the ubatch, since nobody asks before.
void lh_stream::complete(lh::stream_layer & layer) {
    layer.plan.is_active    = false;
    layer.plan.is_completed = true;
}
