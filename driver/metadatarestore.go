// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/klog/v2"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// restore restores metadata files that were removed. The helper writes them only when the kubelet prepares a
// claim, and the kubelet does not prepare running pods' claims. Therefore, the driver calls its own kubelet endpoint.
func (m *deviceMetadata) restore(ctx context.Context) {
	if !m.helper.isStarted() {
		return // the endpoint does not exist yet
	}
	claims, _ := m.records.claims.List() // Driver.restore logs unreadable records
	for _, c := range claims {
		if c.Phase != record.Prepared || !m.records.claims.Current(c) || m.has(c) {
			continue
		}
		if err := m.prepareThroughOwnSocket(ctx, c); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).
				Error(err, "Failed to restore device metadata", "claim", klog.KRef(c.Namespace, c.Name), "claimUID", c.UID)
		}
	}
}

// has reports whether all metadata files of a claim exist.
func (m *deviceMetadata) has(c *record.Claim) bool {
	for _, s := range c.Shares {
		request := resourceclaim.BaseRequestRef(s.Request)
		spec := m.specsPrefix() + string(c.UID) + "_" + request + ".json"
		if _, exists, err := m.specs.Get(spec); err != nil || !exists {
			return false
		}
		file := filepath.Join(m.options.PluginDir, metadataDir, metadataName(c), request, metadataFile)
		if _, err := os.Stat(file); err != nil {
			return false
		}
	}
	return true
}

// ownSocketTimeout is how long the driver waits for one claim before it continues with the next claim.
const ownSocketTimeout = 20 * time.Second

// prepareThroughOwnSocket calls NodePrepareResources on the plugin's own socket, as the
// kubelet does.
func (m *deviceMetadata) prepareThroughOwnSocket(ctx context.Context, c *record.Claim) error {
	target := "unix://" + m.options.kubeletSocket()
	conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, running := m.restoring.LoadOrStore(c.UID, true); running {
		return nil
	}
	stopping := ctx
	defer func() {
		if stopping.Err() == nil { // otherwise the endpoint may still be preparing the claim
			m.restoring.Delete(c.UID)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, ownSocketTimeout)
	defer cancel()
	plugin := drapb.NewDRAPluginClient(conn)
	claims := []*drapb.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}}
	response, err := plugin.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: claims})
	if err != nil {
		return fmt.Errorf("prepare the claim again: %w", err)
	}
	if message := response.GetClaims()[string(c.UID)].GetError(); message != "" {
		return fmt.Errorf("prepare the claim again: %s", message)
	}
	if recorded, err := m.records.claims.Get(c.UID); recorded != nil || err != nil {
		return err
	}
	// The claim was unprepared before the helper wrote the files.
	if _, err = plugin.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: claims}); err != nil {
		return fmt.Errorf("unprepare the claim again: %w", err)
	}
	return nil
}

// checkRestoring returns an error if the claim was unprepared while restore prepares it again: the kubelet
// has not asked for it.
func (m *deviceMetadata) checkRestoring(uid types.UID, recorded *record.Claim) error {
	if _, restoring := m.restoring.Load(uid); restoring && recorded == nil {
		return errors.New("the claim was unprepared while its device metadata was being restored: retry")
	}
	return nil
}
